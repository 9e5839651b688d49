"""What training asks of a strategy. The loop knows no strategy by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Strategy(Protocol):
    """A way to share the work of one run between ``world_size`` processes."""

    rank: int
    world_size: int
    device: torch.device

    def prepare(self, module: torch.nn.Module) -> None:
        """Make the ranks' weights equal before the first step."""

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks in place, and return the sum of ``extra`` (1-D fp64)."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank (plain Python values)."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank (plain Python values)."""
