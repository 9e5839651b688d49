"""Trackers that follow a run: records in ``metrics.jsonl`` are sent to them once, whenever they can be reached.

Records are not pushed to a service directly, because it may be down for hours: a thread of rank 0's process reads them
from the run's own file. A small file next to it, the cursor, records what the service has. So a later start, or `finray
sync`, continues where this one ended.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from finray.config.redact import redact_text
from finray.errors import FinrayError, TrainingError
from finray.files import FileKind, replace_text
from finray.tracking.jsonl import FILE, read_from, totals

# Polling interval of the file, and the maximum interval between attempts to reach a service, in seconds.
EVERY_S, MOST_S = 1.0, 60.0
# Seconds that the end of a run waits for a service.
PATIENCE_S = 30.0
# Records per batch; the cursor is written after each.
BATCH = 50

_CURSORS = FileKind(TrainingError, repair="delete the file: the tracker then gets the whole run again")


@dataclass(frozen=True, slots=True)
class Followed:
    """A run, as passed to a service.

    Attributes:
        run_id: the same at every start.
        config: plain, secrets masked.
    """

    run_id: str
    run_dir: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config["run"]["name"])


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a tracker in the records. It names records, not lines, because a resume rewrites the file.

    Attributes:
        where: the service's address and project; the cursor is only valid there.
        run: the run's id there.
        train: the last training step sent; repeated steps after a resume are not sent again.
        evaluated: steps of the evaluations, in the order in which they were sent.
        system: time of the last system record.
    """

    where: str
    run: str
    train: int = 0
    evaluated: list[int] = field(default_factory=list)
    system: float = 0.0

    def lacks(self, record: Mapping[str, Any]) -> bool:
        """Whether the service still needs a record. Notes are not sent."""
        kind, step = record["kind"], record["step"]
        return bool(
            (kind == "train" and step > self.train)
            or (kind == "eval" and step not in self.evaluated)
            or (kind == "system" and record.get("time", 0.0) > self.system)
        )

    def after(self, records: Iterable[Mapping[str, Any]]) -> Cursor:
        """The cursor after these records were sent."""
        train, evaluated, system = self.train, list(self.evaluated), self.system
        for record in records:
            if record["kind"] == "train":
                train = max(train, record["step"])
            elif record["kind"] == "eval":
                evaluated.append(record["step"])
            else:
                system = max(system, record["time"])
        return replace(self, train=train, evaluated=evaluated, system=system)


class Cursors:
    """The file with the cursors of one service: one for each address that the run was sent to.

    Args:
        run_dir: the run directory.
        name: of the service.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.path = run_dir / f"sent-{name.replace(':', '.')}.json"

    def all(self) -> list[Cursor]:
        """Every cursor in the file. Raises TrainingError: it cannot be read."""
        return _CURSORS.json(self.path, list[Cursor]) if self.path.exists() else []

    def at(self, where: str) -> Cursor | None:
        """The cursor of an address, if there is one."""
        return next((cursor for cursor in self.all() if cursor.where == where), None)

    def keep(self, cursor: Cursor) -> None:
        """Replace the cursor of its address atomically."""
        others = [other for other in self.all() if other.where != cursor.where]
        replace_text(self.path, json.dumps([asdict(other) for other in (*others, cursor)], indent=2) + "\n")


class CursorNotKept(Exception):
    """What a service has cannot be written down: a full disk, for example."""


class Service(ABC):
    """A tracker at an address. Created without arguments; called from one thread, never from the training's.

    Any exception means that the attempt failed and is retried; a :class:`FinrayError` means that a retry cannot help.
    """

    @abstractmethod
    def where(self, run: Followed) -> str:
        """The address and the project; raises a :class:`FinrayError` if the config lacks them."""

    @abstractmethod
    def open(self, run: Followed, known: Cursor | None) -> Cursor:
        """Find the run at the service, or create it.

        Args:
            run: the run to follow.
            known: cursor of an earlier start; None if the service has nothing of the run yet.

        Returns a cursor for what the service has: ``known``, or less if that is known to be wrong.
        """

    @abstractmethod
    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send records, in the order in which they were written; returns when the service has them."""

    @abstractmethod
    def close(self, *, complete: bool, totals: Mapping[str, float]) -> None:
        """The run ends here.

        Args:
            complete: whether it is over.
            totals: numbers of the whole run so far, by name; empty before the first step.
        """

    def url(self) -> str:
        """Web page of the run; empty if there is none."""
        return ""


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record with their names in all trackers: ``train/loss``."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "time")
    }


@dataclass
class Sending:
    """One service and one run: sends missing records in batches, and writes the cursor after each.

    Attributes:
        name: of the service, in ``tracking.trackers``.
        sent: number of records sent by this object.
    """

    name: str
    service: Service
    run: Followed
    sent: int = 0
    _cursor: Cursor | None = None
    # Whether the file of cursors has it.
    _is_kept: bool = False
    # Position in the file up to which records were sent. Only a cache: the cursor decides.
    _offset: int = 0

    def catch_up(self, *, ended: Callable[[], bool] = lambda: False) -> None:
        """Send the records that the service lacks.

        Args:
            ended: whether to leave the rest for later; called between batches.

        Raises:
            Exception: any exception of the service.
        """
        if self._cursor is None:
            cursors = Cursors(self.run.run_dir, self.name)
            self._cursor, self._is_kept = self.service.open(self.run, cursors.at(self.service.where(self.run))), False
        self._keep()
        while not ended():
            batch, ahead, offset = [], self._cursor, self._offset
            for record, after in read_from(self.run.run_dir / FILE, self._offset):
                offset = after
                if ahead.lacks(record):
                    batch.append(record)
                    ahead = ahead.after([record])
                if len(batch) == BATCH:
                    break
            if batch:
                self.service.send(batch)
                # Whether or not that can be written down: this process does not send them again.
                self._cursor, self._is_kept = ahead, False
                self.sent += len(batch)
            self._offset = offset
            self._keep()
            if len(batch) < BATCH:
                return

    def _keep(self) -> None:
        """Write the cursor, if it has changed."""
        if self._cursor is not None and not self._is_kept:
            try:
                Cursors(self.run.run_dir, self.name).keep(self._cursor)
            except OSError as error:
                raise CursorNotKept(error.strerror or str(error)) from None
            self._is_kept = True

    def close(self, *, complete: bool) -> None:
        """Send the totals of the run, and close the service."""
        self.service.close(complete=complete, totals=totals(self.run.run_dir))

    def lock(self) -> FileLock:
        """A lock for sending: two processes at a time would send records twice."""
        return FileLock(self.run.run_dir / f".sent-{self.name.replace(':', '.')}.lock")


class ServiceFollower:
    """Makes a service follow a running training, in a separate thread.

    Args:
        sending: the service and the run.
        every_s: polling interval.
        most_s: maximum interval between attempts.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        sending: Sending,
        *,
        every_s: float = EVERY_S,
        most_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sending = sending
        self._every_s, self._most_s, self._clock = every_s, most_s, clock
        self._ending, self._complete = threading.Event(), False
        self._until = float("inf")
        self._is_reported = False
        self._warning: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"finray-{sending.name}", daemon=True)
        self._thread.start()

    def warning(self) -> str | None:
        """A warning, once."""
        message, self._warning = self._warning, None
        return message

    def end(self, *, complete: bool, patience_s: float) -> None:
        """Request that the last records are sent; wait with :meth:`join`."""
        self._complete, self._until = complete, self._clock() + patience_s
        self._ending.set()

    def join(self) -> None:
        """Wait for the thread, up to the timeout."""
        self._thread.join(max(0.0, self._until - self._clock()))
        if self._thread.is_alive():
            self._warn("did not accept the last records in time")

    def _warn(self, problem: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            name = self._sending.name
            self._warning = (
                f"the tracker {name} {problem}; training continues, and records that it lacks are sent later from "
                f"metrics.jsonl: in this run, at the next start, or by `finray sync {self._sending.run.run_dir}`"
            )

    def _work(self) -> None:
        try:
            while True:
                try:
                    with self._sending.lock().acquire(timeout=0):
                        self._send()
                        return
                except Timeout:
                    self._warn("is already being sent this run by another process")
                    # The other sender will end: a `finray sync`, or a worker that is being killed.
                    if self._ending.wait(self._every_s):
                        return
        except Exception as error:
            self._warn(f"failed: {_described(error)}")

    def _send(self) -> None:
        failures = 0
        while True:
            # Records written before the end is requested are sent by the following attempt.
            ending = self._ending.is_set()
            try:
                self._sending.catch_up(ended=self._is_late)
                failures = 0
                if ending:
                    self._sending.close(complete=self._complete)
                    break
            except FinrayError:
                raise
            except Exception as error:
                failures += 1
                problem = f"cannot be reached: {_described(error)}"
                if isinstance(error, CursorNotKept):
                    name = Cursors(self._sending.run.run_dir, self._sending.name).path
                    problem = f"has got records, which cannot be written down in {name}: {str(error).lower()}"
                self._warn(problem)
                if self._is_late():
                    break
            if self._ending.is_set():
                # Waiting for a set event would not block.
                time.sleep(self._every_s)
            else:
                self._ending.wait(min(self._every_s * 2**failures, self._most_s))

    def _is_late(self) -> bool:
        return self._clock() > self._until


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {redact_text(str(error))[:300]}"
