"""What training asks of a strategy. The loop knows no strategy by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from finray.errors import FinrayError, from_dict
from finray.sharding import FlatShard

T = TypeVar("T")


class StateReader(Protocol):
    """Optimizer state in a checkpoint: any rows of tensors named ``<parameter>/<kind>``."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor; all of it when nothing else is said."""


class NamedOptimizer(Protocol):
    """An optimizer as the loop sees it."""

    parameters: dict[str, torch.nn.Parameter]

    def step(self, learning_rate: float, *, found_inf: torch.Tensor | None = None) -> None:
        """One update from the gradients, which are then freed; none where ``found_inf`` (fp32 scalar) is one."""

    def sharded_state(self) -> Mapping[str, torch.Tensor | FlatShard]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors, or this rank's part of them."""

    def load_sharded_state(self, reader: StateReader) -> None:
        """Put back what :meth:`sharded_state` gave, this rank's part of it."""


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

    def prepare(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        make_optimizer: Callable[[], NamedOptimizer],
        make_torch_optimizer: Callable[[], torch.optim.Optimizer],
    ) -> tuple[torch.nn.Module, NamedOptimizer]:
        """The optimizer, and the module to call for a forward pass.

        Args:
            module: that :meth:`shard` was given.
            parameters: that are trained, by name.
            make_optimizer: makes finray's optimizer, where the strategy has none of its own.
            make_torch_optimizer: makes a torch optimizer of them, for a strategy that drives it itself.
        """

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; ``last`` says that no more come before the update."""

    def broadcast_parameters(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Make weights that every rank has made for itself equal, before the first step."""

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks in place, and return the sum of ``extra`` (1-D fp64)."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks."""

    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:
        """Divide summed gradients by the loss's ``scale`` (fp32 scalar on the device) before they are clipped."""

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""

    def save_own(self, folder: Path) -> bool:
        """Write what the strategy's library keeps of its own; a collective. Returns whether there is such a thing."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank (plain Python values)."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank (plain Python values)."""


def on_all_ranks(strategy: Strategy, action: Callable[[], T]) -> T:
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
    failures = [item for item in strategy.all_gather_object(failure) if item is not None]
    if failures:
        raise from_dict(failures[0])
    return result[0]
