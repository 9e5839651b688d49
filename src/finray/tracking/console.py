"""Live progress: a Rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from finray.records import EvalRecord, Metrics, Note, PrepareProgress, TrainRecord

PLAIN_EVERY_S = 2.0


class ConsoleTracker:
    """Shows records as they come.

    Args:
        console: where to.
        total_steps: length of the run.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, *, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._last_line = -PLAIN_EVERY_S
        self._first: tuple[int, float] | None = None
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("training", total=total_steps, line="")

    def __enter__(self) -> ConsoleTracker:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, record: Metrics) -> None:
        """Show one record; lines that come faster than one can read are left out, the last step's never."""
        if isinstance(record, EvalRecord):
            numbers = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in record.metrics.items())
            self._console.print(f"step {record.step}/{self._total}  {numbers}", highlight=False)
            return
        if isinstance(record, Note):
            self._console.print(record.message, highlight=False)
            return
        line = describe(record)
        now = self._clock()
        if self._first is None or record.step < self._first[0]:
            self._first = (record.step, now)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, line=line)
        elif now - self._last_line >= PLAIN_EVERY_S or record.step == self._total:
            self._last_line = now
            eta = self._eta(record.step, now)
            self._console.print(f"step {record.step}/{self._total}  {line}  {eta}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()

    def _eta(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0]:
            return "eta --"
        left = (self._total - step) * (now - self._first[1]) / (step - self._first[0])
        return f"eta {duration(left)}"


def describe(record: TrainRecord) -> str:
    """The numbers of a training record in one line."""
    norm = "too large for fp16" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    return f"loss {record.loss:.4f}  lr {record.lr:.2e}  grad norm {norm}  {record.tokens_per_s:,.0f} tokens/s"


def duration(seconds: float) -> str:
    """Seconds as ``1h02m``, ``3m05s`` or ``12s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class PrepareView:
    """Shows how far a preparation has come: rows, tokens a second, and the time that is left.

    Args:
        console: where to.
        total: parts of the source.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, *, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last_line = -PLAIN_EVERY_S
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("preparing"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("preparing", total=total, line="")
            self._progress.start()

    def show(self, record: PrepareProgress) -> None:
        """Show one record of progress."""
        line = f"{record.rows:,} rows  {record.tokens / max(record.seconds, 1e-9):,.0f} tokens/s"
        done, total = record.done, record.total
        if self._progress is not None:
            self._progress.update(self._task, completed=done, line=line)
        elif done == total or self._clock() - self._last_line >= PLAIN_EVERY_S:
            self._last_line = self._clock()
            left = duration(record.seconds / done * (total - done))
            self._console.print(f"preparing {done}/{total} parts  {line}  {left} left", highlight=False)
        if done == total:
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
