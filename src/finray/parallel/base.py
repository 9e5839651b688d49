"""What training asks of a strategy. The loop knows no strategy by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from finray.errors import FinrayError, from_dict

T = TypeVar("T")


class Strategy(Protocol):
    """A way to share the work of one run between ``world_size`` processes."""

    rank: int
    world_size: int
    device: torch.device
    # Every rank must do the same number of forward passes, because each is a meeting of all.
    lockstep: bool
    # Weights are built without memory and filled after `shard`, each rank its own rows.
    shards_weights: bool

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """Share the weights of a module between the ranks, block by block and then the rest; or leave it as it is."""

    def align(self, module: torch.nn.Module) -> None:
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


def together(strategy: Strategy, action: Callable[[], T]) -> T:
    """Do something on every rank, and fail on all when it fails on any, so that no rank waits for one that is gone.

    ``action`` may use no collective itself.

    Raises:
        FinrayError: the failure of the lowest rank that has one.
    """
    failure: dict[str, Any] | None = None
    result: list[T] = []
    try:
        result.append(action())
    except FinrayError as error:
        failure = error.to_dict()
    failures = [item for item in strategy.gather(failure) if item is not None]
    if failures:
        raise from_dict(failures[0])
    return result[0]
