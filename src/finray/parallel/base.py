"""What training asks of a strategy. The loop knows no strategy by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from finray.errors import FinrayError, from_dict
from finray.sharding import Elements

T = TypeVar("T")


class StateReader(Protocol):
    """Optimizer state in a checkpoint: any rows of tensors named ``<parameter>/<kind>``."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor; all of it when nothing else is said."""


class Updates(Protocol):
    """An optimizer as the loop sees it."""

    parameters: dict[str, torch.nn.Parameter]

    def update(self, learning_rate: float, *, bad: torch.Tensor | None = None) -> None:
        """One update from the gradients, which are freed; none where ``bad`` (fp32 scalar on the device) is one."""

    def state(self) -> Mapping[str, torch.Tensor | Elements]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors, or this rank's part of them."""

    def restore(self, reader: StateReader) -> None:
        """Put back what :meth:`state` gave, this rank's part of it."""


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

    def optimizer(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        own: Callable[[], Updates],
        client: Callable[[], torch.optim.Optimizer],
    ) -> tuple[torch.nn.Module, Updates]:
        """The optimizer, and the module to call for a forward pass.

        Args:
            module: that :meth:`shard` was given.
            parameters: that are trained, by name.
            own: makes finray's optimizer, where the strategy has none of its own.
            client: makes a torch optimizer over the trained parameters, for a strategy that drives it itself.
        """

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; ``last`` says that no more come before the update."""

    def align(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Make weights that every rank has made for itself equal, before the first step."""

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks in place, and return the sum of ``extra`` (1-D fp64)."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks."""

    def unscale(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:
        """Divide summed gradients by the loss's ``scale`` (fp32 scalar on the device) before they are clipped."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""

    def save_own(self, folder: Path) -> bool:
        """Write what the strategy's library keeps of its own; a collective. Returns whether there is such a thing."""

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
