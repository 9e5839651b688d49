"""Data parallelism: a whole model per rank, gradients summed once per optimizer step.

The gradients are summed here and not by ``DistributedDataParallel``: accumulation then needs no hooks switched on
and off, ranks may have unequal numbers of micro-batches (none, even), and buckets never change their layout, which
keeps sums over more than two ranks bitwise equal after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finray import compat
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.parallel.base import NamedOptimizer
from finray.sharding import local_rows

BUCKET_ELEMENTS = 8 * 2**20


class DDPStrategy:
    """One process of a data-parallel group; of a group of one when torch.distributed is not initialised."""

    lockstep = False
    shards_weights = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self._alone else dist.get_rank()
        self.world_size = 1 if self._alone else dist.get_world_size()

    @classmethod
    def from_config(cls, config: Config, resolved: Resolved, device: torch.device) -> DDPStrategy:  # noqa: ARG003
        """As a config wants it."""
        return cls(device)

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """Nothing: every rank has all weights."""

    def prepare(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],  # noqa: ARG002
        make_optimizer: Callable[[], NamedOptimizer],
        make_torch_optimizer: Callable[[], torch.optim.Optimizer],  # noqa: ARG002
    ) -> tuple[torch.nn.Module, NamedOptimizer]:
        """finray's own optimizer over the module as it is."""
        return module, make_optimizer()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """An ordinary backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def broadcast_parameters(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Broadcast rank 0's: decompositions may differ in the last bits from one kind of machine to another."""
        if self._alone:
            return
        with torch.no_grad():
            for weight in weights:
                dist.broadcast(weight, src=0)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks in place, in buckets of fixed layout; see :class:`Strategy`."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._alone:
            return extra
        pending = []
        for bucket in _buckets(parameters):
            flat = torch.cat([_grad(parameter).reshape(-1) for parameter in bucket])
            pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        dist.all_reduce(extra)
        for bucket, flat, work in pending:
            work.wait()
            start = 0
            for parameter in bucket:
                _grad(parameter).copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        return extra

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks."""
        if not self._alone:
            dist.all_reduce(values)
        return values

    @torch.no_grad()
    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:
        """Divide this rank's gradients, or its rows of them, in place."""
        gradients = [local_rows(one.grad)[0] for one in parameters if one.grad is not None]
        compat.foreach_mul_(gradients, scale.reciprocal())

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""
        limit = float("inf") if max_norm is None else max_norm
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def save_own(self, folder: Path) -> bool:  # noqa: ARG002
        """Nothing."""
        return False

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self._alone:
            return [value]
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, value)
        return boxes


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = []
    size = BUCKET_ELEMENTS
    for parameter in parameters:
        if size + parameter.numel() > BUCKET_ELEMENTS or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets
