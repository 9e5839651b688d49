"""The interface of trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from finray.records import Metrics, RunHeader


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The start of a run, as passed to trackers.

    Attributes:
        run_id: the same at every start of the run.
        resume_step: optimizer steps done; later records will be logged again.
        config: plain, secrets masked.
    """

    run_id: str
    run_dir: Path
    resume_step: int
    config: dict[str, Any]
    header: RunHeader


class Tracker(Protocol):
    """A destination for metrics. Created without arguments, on rank 0 only; called from one thread."""

    def start(self, run: RunInfo) -> None:
        """Called at each start of the workers."""

    def log(self, record: Metrics) -> None:
        """Log one record."""

    def finish(self) -> None:
        """Flush and close; the run has ended, for good or for now."""
