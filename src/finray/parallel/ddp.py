"""Data parallelism: every rank has the whole model, and gradients are summed once per optimizer step.

We do not use ``DistributedDataParallel``: it rebuilds its buckets after the first step, in the order in which gradients
arrived, so sums over more than two ranks would differ in the last bits after a restart. It also needs the same number
of micro-batches on every rank, or a ``Join`` that shadows its collectives; here a rank may have none at all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.parallel.base import NamedOptimizer, ProcessGroup

BUCKET_ELEMENTS = 8 * 2**20


class DDPStrategy(ProcessGroup):
    """One process of a data-parallel group."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buckets: _Buckets | None = None

    @classmethod
    def from_config(cls, config: Config, execution: Execution, device: torch.device) -> DDPStrategy:  # noqa: ARG003
        """Create it from a config."""
        return cls(device)

    def prepare(self, module: torch.nn.Module, optimizer: NamedOptimizer) -> tuple[torch.nn.Module, NamedOptimizer]:
        """Returns both unchanged; from now on gradients are stored in buckets."""
        if not self.is_alone:
            self._buckets = _Buckets(list(optimizer.parameters.values()))
        return module, optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate gradients; in the last backward pass, sum each bucket as soon as it is full."""
        if self._buckets is not None:
            self._buckets.is_last_backward = last
        super().backward(loss, last=last)

    def broadcast_parameters(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Broadcast rank 0's: decompositions may differ in the last bits between kinds of machines."""
        if self.is_alone:
            return
        with torch.no_grad():
            for parameter in parameters:
                dist.broadcast(parameter, src=0)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """All-reduce the buckets that are not in flight yet, and wait for all."""
        if self._buckets is None:
            return super().all_reduce_gradients(parameters, extra)
        self._buckets.all_reduce(extra)
        return extra


class _Buckets:
    """Gradients as views into flat tensors that are all-reduced in place; allocated in a step's first backward pass.

    The layout depends only on the parameters' order, and all-reduces start from the last bucket to the first on every
    rank: collectives must have the same order everywhere, and results must not depend on which gradient was ready
    first.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.is_last_backward = False
        self._buckets: list[_Bucket] = []
        size = BUCKET_ELEMENTS
        for parameter in parameters:
            if size + parameter.numel() > BUCKET_ELEMENTS or self._buckets[-1].dtype != parameter.dtype:
                self._buckets.append(_Bucket(parameter.dtype))
                size = 0
            bucket = self._buckets[-1]
            bucket.offsets[parameter] = size
            size += parameter.numel()
            hook = functools.partial(self._accumulated, bucket)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._buckets.reverse()
        self._reset()

    def _reset(self) -> None:
        self._started: list[dist.Work] = []
        for bucket in self._buckets:
            bucket.flat = None
            bucket.missing = len(bucket.offsets)

    def _accumulated(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        """Called by autograd when a gradient is ready."""
        bucket.take(parameter)
        if self.is_last_backward:
            bucket.missing -= 1
            while len(self._started) < len(self._buckets) and not self._buckets[len(self._started)].missing:
                self._start_next()

    def _start_next(self) -> None:
        flat = self._buckets[len(self._started)].all_gradients()
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._started.append(work)

    def all_reduce(self, extra: torch.Tensor) -> None:
        """All-reduce what is not in flight yet, ``extra`` last, and wait for everything."""
        while len(self._started) < len(self._buckets):
            self._start_next()
        dist.all_reduce(extra)
        for work in self._started:
            work.wait()
        # The gradients keep the memory alive until the optimizer frees them.
        self._reset()


class _Bucket:
    """Parameters of one dtype whose gradients are contiguous in one flat tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.offsets: dict[torch.Tensor, int] = {}
        self.flat: torch.Tensor | None = None
        self.missing = 0

    def take(self, parameter: torch.Tensor) -> None:
        """Make a gradient a view into the flat tensor. Autograd accumulates later micro-batches in place."""
        gradient = parameter.grad
        if len(self.offsets) == 1:
            # A single parameter: its gradient is the flat tensor, which saves copying a large one.
            if gradient is None or not gradient.is_contiguous():
                parameter.grad = gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            self.flat = gradient
            return
        if self.flat is None:
            size = sum(other.numel() for other in self.offsets)
            self.flat = torch.zeros(size, dtype=self.dtype, device=parameter.device)
        view = self.flat.narrow(0, self.offsets[parameter], parameter.numel()).view_as(parameter)
        if gradient is None or gradient.data_ptr() != view.data_ptr():
            if gradient is not None:
                view.copy_(gradient)
            parameter.grad = view

    def all_gradients(self) -> torch.Tensor:
        """The flat tensor; zero for gradients that this rank does not have."""
        for parameter in self.offsets:
            self.take(parameter)
        assert self.flat is not None
        return self.flat
