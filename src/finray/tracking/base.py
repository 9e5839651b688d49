"""Passes records to trackers, and isolates a run from their failures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from finray.config.extensions import load_named
from finray.config.redact import redact_text
from finray.errors import ConfigError
from finray.records import Metrics
from finray.tracking.follow import PATIENCE_S as FOLLOWER_PATIENCE_S
from finray.tracking.follow import Service, ServiceFollower
from finray.tracking.jsonl import JsonlTracker
from finray.tracking.protocol import RunInfo, Tracker
from finray.tracking.system import Sampler

# Maximum backlog of records for a slow tracker, before the oldest are dropped.
BACKLOG = 10_000
# Seconds after which a call counts as hanging, and that the end of a run waits for each tracker.
PATIENCE_S = 60.0


def make_tracker(name: str) -> Tracker | Service:
    """The tracker with this name in ``tracking.trackers``, or the service that follows the run.
    Raises ConfigError: there is no such tracker, or it cannot be created."""
    make = load_named("finray.trackers", name, where="tracking.trackers")
    try:
        tracker: Tracker | Service = make()
    except Exception as error:
        raise ConfigError(
            f"the tracker {name} {_failed(error)}",
            where="tracking.trackers",
            repair="it is created without arguments; fix it, or leave it out",
        ) from None
    return tracker


class Trackers:
    """Passes records to the run's own file and to trackers, none of which can stop a run.

    A tracker that raises is reported once and not called again. Those in ``background`` have a thread each, because a
    service may hang; this is also reported once.

    Args:
        inline: called synchronously, in order.
        background: by name.
        records: the run's own file, which must be on disk before a checkpoint is; None on ranks other than the first.
        follow: creates those that read the run's own file, once that exists.
        machine: samples the system metrics; it is stopped at the end.
        warn: called in the caller's thread when a tracker fails.
        clock: seconds, monotonic.
        patience_s: seconds after which a call counts as hanging.
    """

    def __init__(
        self,
        inline: Mapping[str, Tracker],
        background: Mapping[str, Tracker],
        *,
        records: JsonlTracker | None = None,
        follow: Callable[[RunInfo], list[ServiceFollower]] = lambda run: [],
        machine: Sampler | None = None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._records = records
        self._inline = dict(inline)
        self._background = {name: _Background(tracker, clock) for name, tracker in background.items()}
        self._follow, self._followers = follow, list[ServiceFollower]()
        self._machine = machine
        self._warn = warn
        self._clock = clock
        self._patience_s = patience_s

    @property
    def is_behind(self) -> bool:
        """Whether the run's own file lacks records, because it could not be written."""
        return self._records is not None and self._records.is_behind

    def start(self, run: RunInfo) -> None:
        """Tell all of them that the run starts here. Raises CheckpointError: the run's own file cannot be written."""
        if self._records is not None:
            self._records.start(run)
        self._each(lambda tracker: tracker.start(run))
        self._followers = self._follow(run)

    def log(self, record: Metrics) -> None:
        """Pass a record to all of them."""
        for metrics in [*([] if self._machine is None else self._machine.take(record.step)), record]:
            if self._records is not None:
                self._records.log(metrics)
            self._each(lambda tracker, metrics=metrics: tracker.log(metrics))  # type: ignore[misc]
        self._warn_of_followers()

    def keep(self) -> None:
        """Write every record to the disk in the run's own file. Raises CheckpointError: that failed."""
        if self._records is not None:
            self._records.keep()

    def finish(self, *, complete: bool = False, patience_s: float = FOLLOWER_PATIENCE_S) -> None:
        """Wait for pending records, up to a timeout.

        Args:
            complete: whether the run is over.
            patience_s: time that services have for the last records, in total.
        """
        if self._machine is not None:
            self._machine.stop()
        if self._records is not None:
            self._records.finish()
        self._each(lambda tracker: tracker.finish())
        for follower in self._followers:
            follower.end(complete=complete, patience_s=patience_s)
        for follower in self._followers:
            follower.join()
        self._warn_of_followers()
        until = self._clock() + self._patience_s
        for name, tracker in list(self._background.items()):
            tracker.stop(max(0.0, until - self._clock()))
            self._leave_out_if_failed(name, tracker, patience_s=0.0)

    def _warn_of_followers(self) -> None:
        for follower in self._followers:
            if (message := follower.warning()) is not None:
                self._warn(message)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._inline.items()):
            try:
                call(tracker)
            except Exception as error:
                # A tracker may raise anything: the run is worth more than its records.
                del self._inline[name]
                self._leave_out(name, _failed(error))
        for name, background in list(self._background.items()):
            background.put(call)
            self._leave_out_if_failed(name, background, patience_s=self._patience_s)

    def _leave_out_if_failed(self, name: str, tracker: _Background, *, patience_s: float) -> None:
        if tracker.error is not None:
            reason = _failed(tracker.error)
        elif tracker.busy_for() > patience_s:
            reason = f"has not answered for {tracker.busy_for():.0f} s"
        else:
            return
        del self._background[name]
        self._leave_out(name, reason)

    def _leave_out(self, name: str, reason: str) -> None:
        self._warn(
            f"the tracker {name} {reason}; training continues without it, and it gets nothing more of this start; "
            "metrics.jsonl, which `finray report` shows, does not depend on it"
        )


def _failed(error: Exception) -> str:
    return f"failed: {redact_text(f'{type(error).__name__}: {error}')[:300]}"


class _Background:
    """A tracker with its own thread and queue."""

    def __init__(self, tracker: Tracker, clock: Callable[[], float]) -> None:
        self.error: Exception | None = None
        self._tracker = tracker
        self._clock = clock
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(BACKLOG)
        self._since: float | None = None
        self._thread = threading.Thread(target=self._work, name="finray-tracker", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        while True:
            try:
                self._calls.put_nowait(call)
                return
            except queue.Full:
                self._calls.get_nowait()

    def busy_for(self) -> float:
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def stop(self, timeout_s: float) -> None:
        self.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._since = self._clock()
            try:
                call(self._tracker)
            except Exception as error:
                self.error = error
                return
            finally:
                self._since = None
