"""The data of each optimizer step, worked out one step ahead in a thread of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch, collate
from finray.data.sampling.order import Order, micro_batches
from finray.data.sampling.packing import PackPlan


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's share of an optimizer step, and what is known of the whole.

    Attributes:
        shares: (index of the micro-batch within the step, batch).
        fillers: batches that are passed through the model for nothing, where all ranks must do the same number.
        supervised: targets of the whole step, over all ranks: what the loss is divided by.
        tokens: tokens of the whole step.
        samples: rows of the whole step, in order.
        items: packs (or rows) of the whole step; the cursor moves by this much.
    """

    shares: list[tuple[int, Batch]]
    supervised: int
    tokens: int
    samples: tuple[int, ...]
    items: int
    fillers: tuple[Batch, ...] = ()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that two steps share exactly when they saw the same rows in the same order."""
        return hashlib.sha256(",".join(map(str, self.samples)).encode()).hexdigest()[:16]


class Feed:
    """Makes :class:`StepData` from the prepared rows.

    Args:
        split: the training rows.
        plan: how rows form packs.
        order: the stream of packs.
        global_batch_size: packs per step.
        micro_batch_size: packs per forward pass.
        rank: this process.
        world_size: number of processes.
        lockstep: whether every process must do the same number of forward passes.
        rows_apart: whether each row gets a forward pass of its own (see ``finray.models.packing_check``). What a step
            consists of does not change.
        pin: put batches where a GPU can fetch them by itself.
    """

    def __init__(
        self,
        split: PreparedSplit,
        plan: PackPlan,
        order: Order,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        lockstep: bool = False,
        rows_apart: bool = False,
        pin: bool = False,
    ) -> None:
        self._lockstep = lockstep
        self._pin = pin
        self._rows_apart = rows_apart
        self._split = split
        self._plan = plan
        self._order = order
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size

    def rows_from(self, position: int) -> Iterator[int]:
        """The rows that will be read from a position of the stream on, through one epoch."""
        for item in self._order.batch(position, self._order.count):
            yield from self._plan.pack(item)

    def at(self, position: int) -> StepData:
        """The step that starts at a position of the stream: a pure function of it."""
        items = self._order.batch(position, self._global_batch_size)
        samples = tuple(row for item in items for row in self._plan.pack(item))
        passes = self._passes(items)
        missing = self._most_passes(items) - len(passes) if self._lockstep else 0
        filler = self._batch(samples[:1] if self._rows_apart else self._plan.pack(items[0])) if missing else None
        return StepData(
            fillers=() if filler is None else (filler,) * missing,
            shares=[(index, self._batch(rows)) for index, rows in passes],
            supervised=int(self._split.supervised[list(samples)].sum()),
            tokens=int(self._split.lengths[list(samples)].sum()),
            samples=samples,
            items=len(items),
        )

    def _passes(self, items: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """This rank's forward passes: a number that no other of the step has, over all ranks, and rows."""
        shares = micro_batches(
            items, micro_batch_size=self._micro_batch_size, rank=self._rank, world_size=self._world_size
        )
        found: list[tuple[int, tuple[int, ...]]] = []
        for one in shares:
            rows = tuple(row for item in one.items for row in self._plan.pack(item))
            if not self._rows_apart:
                found.append((one.index, rows))
                continue
            before = sum(len(self._plan.pack(item)) for item in items[: one.index * self._micro_batch_size])
            found += [(before + at, (row,)) for at, row in enumerate(rows)]
        return found

    def _most_passes(self, items: list[int]) -> int:
        """Forward passes of the rank that has most of them."""
        if not self._rows_apart:
            return -(-len(items) // (self._micro_batch_size * self._world_size))
        passes = [0] * self._world_size
        for at, item in enumerate(items):
            passes[at // self._micro_batch_size % self._world_size] += len(self._plan.pack(item))
        return max(passes)

    def _batch(self, rows: tuple[int, ...]) -> Batch:
        batch = collate([self._split.row(row) for row in rows], rows)
        return batch.pinned() if self._pin else batch


def pack_batch(split: PreparedSplit, plan: PackPlan, items: tuple[int, ...]) -> Batch:
    """The rows of some packs as one batch."""
    rows = [row for item in items for row in plan.pack(item)]
    return collate([split.row(row) for row in rows], rows)


class Ahead:
    """Hands out the data of consecutive positions, always working on the next one.

    Attributes:
        waited: seconds the caller has waited for data.
    """

    def __init__(
        self, make: Callable[[int], StepData], position: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make = make
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finray-feed")
        self._next: Future[StepData] = self._pool.submit(make, position)
        self._position = position
        self.waited = 0.0

    def take(self, *, last: bool) -> StepData:
        """The data at the cursor, which moves on."""
        start = self._clock()
        data = self._next.result()
        self.waited += self._clock() - start
        self._position += data.items
        if not last:
            self._next = self._pool.submit(self._make, self._position)
        return data

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def evaluation_batches(
    split: PreparedSplit, plan: PackPlan, *, micro_batch_size: int, rank: int, world_size: int, lockstep: bool = False
) -> Iterator[tuple[Batch, bool]]:
    """One rank's share of the evaluation rows, in packs; False marks those that are there for the other ranks' sake."""
    packs = list(range(len(plan)))
    shares = micro_batches(packs, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
    for share in shares:
        yield pack_batch(split, plan, share.items), True
    if lockstep:
        for _ in range(-(-len(packs) // (micro_batch_size * world_size)) - len(shares)):
            yield pack_batch(split, plan, (0,)), False
