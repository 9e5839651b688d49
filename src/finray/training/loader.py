"""The data of each optimizer step, prefetched one step ahead in a thread."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.order import Order, micro_batches
from finray.data.sampling.packing import PackPlan, plan_packs
from finray.objectives.base import WeightArray
from finray.training.task import TaskBatch

Collate = Callable[[Sequence[int]], TaskBatch]


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's share of an optimizer step, and totals of the whole step.

    Attributes:
        micro_batches: (index of the micro-batch within the step, batch).
        dummy_batches: batches whose result is ignored, if all ranks must run the same number of forward passes.
        before: batches of the pass without gradients that the objective asks for; False marks one whose result is
            ignored.
        weight: of the whole step, over all ranks: the divisor of the loss.
        supervised: targets of the whole step.
        tokens: tokens of the whole step.
        samples: rows of the whole step, in order.
        items: packs (or rows) of the whole step; the cursor moves by this much.
    """

    micro_batches: list[tuple[int, TaskBatch]]
    weight: float
    supervised: int
    tokens: int
    samples: tuple[int, ...]
    items: int
    dummy_batches: tuple[TaskBatch, ...] = ()
    before: tuple[tuple[TaskBatch, bool], ...] = ()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits; equal for two steps exactly if they saw the same rows in the same order."""
        return hashlib.sha256(",".join(map(str, self.samples)).encode()).hexdigest()[:16]


class StepSource(Protocol):
    """Where the steps of a run come from: prepared rows, or what a model has sampled.

    A position is a number of items (packs, rows or groups) of one stream over all epochs; what is at a position does
    not depend on the number of workers, on restarts or on earlier calls.
    """

    @property
    def items_per_epoch(self) -> int:
        """By which positions become epochs."""

    @property
    def global_batch_size(self) -> int:
        """Items of a step; only the last of a run may have fewer."""

    @property
    def total(self) -> int | None:
        """Items of the stream; None for an infinite one."""

    @property
    def is_ahead(self) -> bool:
        """Whether a step can be made while the one before it is computed; one that follows from the weights cannot."""

    def at(self, position: int) -> StepData:
        """This rank's share of the step that starts at a position."""


@dataclass(frozen=True, slots=True)
class StepLoader:
    """Creates :class:`StepData` from prepared rows: a pure function of the position in the stream.

    Attributes:
        plan: how rows form packs.
        order: the stream of packs.
        collate: makes a batch from rows of the split.
        weight: of each row in the loss.
        lockstep: whether every process must run the same number of forward passes.
        rows_apart: whether a forward pass only has rows of one length (see ``finray.models.packing_check``). The rows
            of a step stay the same.
        joined: the groups (or rows) of a step are joined into packs of so many tokens; None leaves each alone.
        before: of the pass that the objective asks for before a step: the tokens that are read instead of a row, and
            collate; None if it asks for none.
        pin: whether batches are put in pinned memory.
    """

    split: PreparedSplit
    plan: PackPlan
    order: Order
    collate: Collate
    weight: WeightArray
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    lockstep: bool = False
    rows_apart: bool = False
    joined: int | None = None
    before: tuple[Callable[[int], int], Collate] | None = None
    pin: bool = False

    is_ahead: ClassVar[bool] = True

    @property
    def items_per_epoch(self) -> int:
        """Packs, rows or groups."""
        return len(self.plan)

    @property
    def total(self) -> int | None:
        """Items of the stream; None for an infinite one."""
        return self.order.total

    def rows_from(self, position: int) -> Iterator[int]:
        """The rows in the order of the stream, from a position on, through one epoch."""
        for item in self.order.batch(position, self.order.count):
            yield from self.plan.pack(item)

    def at(self, position: int) -> StepData:
        """The step that starts at a position of the stream."""
        items = self.order.batch(position, self.global_batch_size)
        packs = [self.plan.pack(item) for item in items]
        samples = [row for pack in packs for row in pack]
        batches, dummy = self._share(packs, lambda row: int(self.split.lengths[row]), self.collate)
        before = list[tuple[TaskBatch, bool]]()
        if self.before is not None:
            counted, idle = self._share(packs, *self.before)
            before = [*((batch, True) for _, batch in counted), *((batch, False) for batch in idle)]
        return StepData(
            micro_batches=batches,
            weight=float(self.weight[samples].sum()),
            supervised=int(self.split.supervised[samples].sum()),
            tokens=int(self.split.lengths[samples].sum()),
            samples=tuple(samples),
            items=len(items),
            dummy_batches=tuple(dummy),
            before=tuple(before),
        )

    def _share(
        self, packs: list[tuple[int, ...]], length: Callable[[int], int], collate: Collate
    ) -> tuple[list[tuple[int, TaskBatch]], list[TaskBatch]]:
        """This rank's batches of a step, with their indices, and those whose result is ignored."""
        if self.joined is not None:
            joined = plan_packs([sum(map(length, rows)) for rows in packs], self.joined)
            packs = [tuple(row for at in joined.pack(pack) for row in packs[at]) for pack in range(len(joined))]
        # Every rank computes the passes of all ranks, which saves communication.
        passes = [self._passes(packs, length, rank) for rank in range(self.world_size)]
        own_passes = passes[self.rank]
        missing = max(map(len, passes)) - len(own_passes) if self.lockstep else 0

        def batch(rows: Sequence[int]) -> TaskBatch:
            made = collate(rows)
            return made.pin_memory() if self.pin else made

        dummy = [batch(packs[0][:1] if self.rows_apart else packs[0])] * missing if missing else []
        return [(index, batch(rows)) for index, rows in own_passes], dummy

    def _passes(
        self, packs: list[tuple[int, ...]], length: Callable[[int], int], rank: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """A rank's forward passes: an index that is unique in the step over all ranks, and rows."""
        size, everything = self.micro_batch_size, list(range(len(packs)))
        passes: list[tuple[int, tuple[int, ...]]] = []
        for micro_batch in micro_batches(everything, micro_batch_size=size, rank=rank, world_size=self.world_size):
            rows = tuple(row for at in micro_batch.items for row in packs[at])
            if self.rows_apart:
                before = sum(map(len, packs[: micro_batch.index * size]))
                alike: dict[int, list[int]] = {}
                for row in rows:
                    alike.setdefault(length(row), []).append(row)
                passes += [(before + at, tuple(same_length)) for at, same_length in enumerate(alike.values())]
            else:
                passes.append((micro_batch.index, rows))
        return passes


class Prefetcher:
    """Returns the data of consecutive positions, prefetching the next one if that is possible.

    Attributes:
        waited: seconds the caller has waited for data.
    """

    def __init__(
        self,
        make: Callable[[int], StepData],
        position: int,
        *,
        is_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make = make
        self._clock = clock
        self._is_ahead = is_ahead
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finray-loader")
        self._next: Future[StepData] | None = self._pool.submit(make, position) if is_ahead else None
        self._position = position
        self.waited = 0.0

    def take(self, *, last: bool) -> StepData:
        """The data at the cursor; advances the cursor."""
        start = self._clock()
        data = self._make(self._position) if self._next is None else self._next.result()
        self.waited += self._clock() - start
        self._position += data.items
        if self._is_ahead and not last:
            self._next = self._pool.submit(self._make, self._position)
        return data

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class EvalLoader:
    """One rank's share of the evaluation rows, one pack at a time; created for each evaluation.

    Attributes:
        plan: how rows form packs.
        collate: makes a batch from rows of the split.
        lockstep: whether every process must run the same number of forward passes.
        rows: number of evaluated rows, over all ranks.
        weight: total weight of these rows.
        held_out: number of rows in the split; ``evaluation.max_rows`` may exclude some.
        before: packs and batches of the pass that the objective asks for before any loss; None if it asks for none.
    """

    plan: PackPlan
    collate: Collate
    rank: int
    world_size: int
    lockstep: bool
    rows: int
    weight: int
    held_out: int
    before: tuple[PackPlan, Collate] | None = None

    @property
    def passes(self) -> int:
        """The most forward passes of a rank."""
        return -(-len(self.plan) // self.world_size)

    def batches(self) -> Iterator[tuple[TaskBatch, bool]]:
        """Batches; False marks a dummy batch, which is only there because other ranks have one more."""
        return self._share(self.plan, self.collate)

    def batches_before(self) -> Iterator[tuple[TaskBatch, bool]]:
        """Likewise, of :attr:`before`."""
        return iter(()) if self.before is None else self._share(*self.before)

    def _share(self, plan: PackPlan, collate: Collate) -> Iterator[tuple[TaskBatch, bool]]:
        own_packs = range(self.rank, len(plan), self.world_size)
        for pack in own_packs:
            yield collate(plan.pack(pack)), True
        if self.lockstep and len(own_packs) < -(-len(plan) // self.world_size):
            yield collate(plan.pack(0)), False
