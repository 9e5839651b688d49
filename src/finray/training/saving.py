"""Checkpoints of a group of ranks, at once or behind the training.

A snapshot is taken at the step. Written behind the training, it is written by a thread in each rank, and becomes a
checkpoint at the step at which every rank has said that it is done (a number that travels with the sum of the loss).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.checkpoint import CheckpointStore
from finray.config.schema import CheckpointConfig
from finray.errors import FinrayError, from_dict
from finray.parallel.base import Strategy, on_all_ranks
from finray.training.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that has been written, and the metrics in its manifest."""

    path: Path
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Pending:
    scratch: Path
    step: int
    metrics: dict[str, float]
    written: Future[list[dict[str, Any]]]


class Saver:
    """Writes checkpoints, one at a time; every method is a collective.

    Args:
        store: where they go.
        strategy: of the group.
        config: the checkpoint section.
        clock: seconds, monotonic.

    Attributes:
        stalled: seconds that training has waited for storage.
    """

    def __init__(
        self,
        store: CheckpointStore,
        strategy: Strategy,
        config: CheckpointConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._strategy = strategy
        self._config = config
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finray-checkpoint")
        self._pending: _Pending | None = None
        self.stalled = 0.0

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part of a checkpoint that is not one yet."""
        return self._pending is not None and self._pending.written.done()

    def begin(self, snapshot: Snapshot, *, step: int, metrics: dict[str, float]) -> None:
        """Start to write a snapshot; the one before must be finished.

        Raises:
            FinrayError: on every rank alike.
        """
        assert self._pending is None
        first = self._strategy.rank == 0
        scratch = on_all_ranks(self._strategy, lambda: str(self._store.begin(step)) if first else "")
        folder = Path(self._strategy.broadcast_object(scratch))
        # A collective, and of what training changes: it cannot be done behind the training.
        library = folder / f".library-{self._strategy.rank}"
        snapshot.library = library if self._strategy.save_own(library) else None
        written = self._pool.submit(self._store.fill, folder, step, snapshot.write)
        self._pending = _Pending(folder, step, metrics, written)

    def finish(self) -> Saved | None:
        """Wait for what is being written, and make it a checkpoint; None where nothing is.

        Raises:
            FinrayError: on every rank alike; the checkpoint before stands.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        started = self._clock()
        try:
            entries = on_all_ranks(self._strategy, pending.written.result)
            everyone = [entry for own in self._strategy.all_gather_object(entries) for entry in own]
            path = self._commit(pending, everyone)
        finally:
            if self._strategy.rank == 0:
                self._store.abandon(pending.scratch)
            self.stalled += self._clock() - started
        return Saved(path, pending.step, pending.metrics)

    def _commit(self, pending: _Pending, entries: list[dict[str, Any]]) -> Path:
        path: str | None = None
        failure: dict[str, Any] | None = None
        if self._strategy.rank == 0:
            try:
                path = str(self._store.commit(pending.scratch, pending.step, entries, metrics=pending.metrics))
                self._store.prune(keep_last=self._config.keep_last, keep_best=self._config.keep_best)
            except FinrayError as error:
                failure = error.to_dict()
        # A failed write must stop every rank: a rank that went on would wait for this one for ever.
        path, failure = self._strategy.broadcast_object((path, failure))
        if failure is not None:
            raise from_dict(failure)
        return Path(str(path))

    def close(self) -> None:
        """Leave the thread behind, and a checkpoint that was not finished unfinished."""
        self._pool.shutdown(wait=False, cancel_futures=True)
