"""Live progress: a Rich bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from finray.records import EvalProgress, EvalRecord, Note, PrepareProgress, Record, RunHeader, TrainRecord

PLAIN_EVERY_S = 2.0
# Steps of a run whose lines stay on a terminal.
_KEPT = 20
# Of the workers in a header.
_SHOWN_WORKERS = 8
# A notebook is sent the whole bar each time.
_NOTEBOOK_EVERY_S = 0.2


class _View:
    """A bar on a terminal or in a notebook; elsewhere lines, of which those that come too fast to be read are left out.

    Args:
        console: where to.
        what: the word beside the bar.
        total: steps (or parts) of the whole.
        done: how many of them there are already.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, what: str, total: int, clock: Callable[[], float], done: int = 0) -> None:
        self._console = console
        self._total = total
        self._clock = clock
        self._last_line = -PLAIN_EVERY_S
        self._progress: Progress | None = None
        self._in_notebook: Any = None
        if console.is_terminal or console.is_jupyter:
            line = TextColumn("{task.fields[line]}", markup=False)
            self._progress = Progress(
                TextColumn(what), BarColumn(), MofNCompleteColumn(), line, TimeRemainingColumn(), console=console
            )
            self._task = self._progress.add_task(what, total=total, completed=done, line="")
            if console.is_terminal:
                self._progress.start()
            else:
                # Rich's own way needs ipywidgets, which many notebooks do not have.
                from IPython.display import display

                self._in_notebook = display(self._progress, display_id=True)

    def _show(self, done: int, line: str, now: float, plain: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, line=line)
            if self._in_notebook is not None and (now - self._last_line >= _NOTEBOOK_EVERY_S or done == self._total):
                self._last_line = now
                self._in_notebook.update(self._progress)
        elif now - self._last_line >= PLAIN_EVERY_S or done == self._total:
            self._last_line = now
            self._console.print(plain, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            if self._in_notebook is None:
                self._progress.stop()
            self._progress = None


class ConsoleTracker(_View):
    """Shows a training; the last step's line is never left out."""

    def __init__(
        self, console: Console, *, total_steps: int, step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, "training", total_steps, clock, done=step)
        self._first: tuple[int, float] | None = None
        self._evaluation: tuple[int, str] | None = None
        self._from = self._next = self._since = 0.0

    def evaluates(self, record: EvalProgress) -> None:
        """Show how far an evaluation has come; as lines, ten of each."""
        now = self._clock()
        if self._evaluation != (record.step, record.part):
            self._evaluation = (record.step, record.part)
            self._from, self._since, self._next = record.share, now, 0.0
        done = record.share - self._from
        left = duration((1 - record.share) * (now - self._since) / done) if done > 0 else "--"
        text = f"{record.part} {record.share:.0%}"
        if self._progress is not None:
            self._show(record.step, f"{text}  {left} left", now, "")
        elif record.share >= self._next:
            self._next = record.share + 0.1
            self._console.print(f"step {record.step}/{self._total}  {text}  eta {left}", highlight=False)

    def log(self, record: TrainRecord | EvalRecord) -> None:
        """Show one record."""
        at = f"step {record.step}/{self._total}"
        if isinstance(record, EvalRecord):
            self._console.print(f"{at}  {describe(record)}", highlight=False)
            return
        now = self._clock()
        if self._first is None or record.step < self._first[0]:
            self._first = (record.step, now)
        done = record.step - self._first[0]
        left = duration((self._total - record.step) * (now - self._first[1]) / done) if done else "--"
        line = describe(record)
        passed = record.step * _KEPT // self._total > (record.step - 1) * _KEPT // self._total
        if self._progress is not None and self._in_notebook is None and passed:
            # The bar shows the last step alone; these stay above it.
            self._console.print(f"{at}  {line}", highlight=False)
        self._show(record.step, line, now, f"{at}  {line}  eta {left}")


class PrepareView(_View):
    """Shows how far a preparation has come: rows, tokens a second, and the time that is left."""

    def __init__(self, console: Console, *, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "preparing", total, clock)

    def show(self, record: PrepareProgress) -> None:
        """Show one record of progress."""
        line = f"{record.rows:,} rows  {record.tokens / max(record.seconds, 1e-9):,.0f} tokens/s"
        done, total = record.done, record.total
        left = duration(record.seconds / max(done, 1) * (total - done))
        self._show(done, line, self._clock(), f"preparing {done}/{total} parts  {line}  {left} left")
        if done == total:
            self.close()


def describe(record: TrainRecord | EvalRecord) -> str:
    """The numbers of a record in one line."""
    if isinstance(record, EvalRecord):
        # Of a classifier's, those that say the most; the run's records have all of them.
        metrics = record.metrics
        hidden = ("precision_", "recall_", "f1_weighted", "matthews_corrcoef") if "f1_macro" in metrics else ()
        shown = {name: value for name, value in metrics.items() if not name.startswith(hidden)}
        return "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items())
    norm = "too large for fp16" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    return f"loss {record.loss:.4f}  lr {record.lr:.2e}  grad norm {norm}  {record.tokens_per_s:,.0f} tokens/s"


def duration(seconds: float) -> str:
    """Seconds as ``1h02m``, ``3m05s`` or ``12s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class RunView:
    """Shows the records of a run as they come: notes, the header, progress, warnings.

    Args:
        target: where to.
        quiet: show warnings alone.
    """

    def __init__(self, target: Console, *, quiet: bool = False) -> None:
        self._console = target
        self._quiet = quiet
        self._progress: ConsoleTracker | None = None
        self._preparing: PrepareView | None = None

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *error: object) -> None:
        for view in (self._progress, self._preparing):
            if view is not None:
                view.close()

    def handle(self, record: Record) -> None:
        """Show one record."""
        if self._quiet and not (isinstance(record, Note) and record.level == "warning"):
            return
        if isinstance(record, RunHeader):
            if self._progress is not None:
                self._progress.close()
                self._console.print("the workers were restarted", style="bold yellow", highlight=False)
            for line in header_lines(record):
                self._console.print(line, highlight=False, soft_wrap=True)
            self._progress = ConsoleTracker(self._console, total_steps=record.total_steps, step=record.step)
        elif isinstance(record, PrepareProgress):
            self._preparing = self._preparing or PrepareView(self._console, total=record.total)
            self._preparing.show(record)
        elif isinstance(record, Note):
            is_warning = record.level == "warning"
            text = f"warning: {record.message}" if is_warning else record.message
            self._console.print(text, style="bold yellow" if is_warning else None, highlight=False, soft_wrap=True)
        elif isinstance(record, EvalProgress):
            if self._progress is not None:
                self._progress.evaluates(record)
        elif self._progress is not None:
            self._progress.log(record)


def several(count: float, noun: str) -> str:
    """A number of things: ``1 step``, ``2 steps``."""
    return f"{count:,.12g} {noun}{'' if count == 1 else 's'}"


def header_lines(header: RunHeader) -> list[str]:
    """The run header: model, trainable share, data, placement, effective batch, and where the run stands."""
    group = "pair" if header.rows == 2 * header.packs else "group"
    unit = "pack" if header.packing else group if header.in_groups else "row"
    lines = [
        f"model      {header.model}  {header.parameters / 1e6:,.1f} M parameters, "
        f"{header.trainable / 1e6:,.2f} M trained ({header.trainable / header.parameters:.2%}), {header.precision}",
        *([f"method     {header.method}"] if header.method else []),
        f"data       {header.rows:,} rows, {header.tokens:,} tokens"
        + ("" if header.labelled else f" ({header.supervised / header.tokens:.0%} learned)")
        + (f" in {header.packs:,} packs ({header.fill:.1%} full)" if header.packing else "")
        + (f" in {several(header.packs, group)}" if header.in_groups else "")
        + (f"; {header.held_out:,} rows held out" if header.held_out else "")
        + (f", {header.eval_rows:,} of them evaluated" if header.eval_rows < header.held_out else ""),
        f"placement  {header.world_size} x {header.device}"
        + (f", {header.threads} thread{'s' if header.threads > 1 else ''} each" if header.device == "CPU" else ""),
        *_workers(header),
        f"batch      {several(header.global_batch_size, unit)}{_divided(header)}",
        f"run        {several(header.total_steps, 'step')}, {several(round(header.epochs, 2), 'epoch')}",
    ]
    if header.step:
        lines.append(f"resuming   at step {header.step} of {header.total_steps}")
    if header.evaluates:
        # It can take minutes, in which nothing else is shown.
        lines.append(f"evaluating {several(header.eval_rows, 'row')} before the first step (evaluation.on_start)")
    return lines


def _workers(header: RunHeader) -> list[str]:
    """The ranks of each process, as torch's launchers call them."""
    lines = [f"           {worker}" for worker in header.workers[:_SHOWN_WORKERS]]
    more = len(header.workers) - len(lines)
    return [*lines, *([f"           and {more:,} more workers"] if more else [])]


def _divided(header: RunHeader) -> str:
    """How a step is shared out between workers and forward passes."""
    size, workers, micro, passes = (
        header.global_batch_size,
        header.world_size,
        header.micro_batch_size,
        header.accumulation,
    )
    if (busy := -(-size // micro)) < workers:
        return f", by {busy} of {workers} workers"
    sign = " =" if size == workers * micro * passes else ", at most"
    return f"{sign} {several(workers, 'worker')} x {micro} micro-batch x {passes} accumulation"


@contextmanager
def steps(target: Console, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Shows how far each part of an evaluation has come: a function of what, rows done, ``total``, rate."""
    status = target.status("evaluating") if target.is_terminal and not quiet else None

    def update(what: str, done: int, *, total: int, rate: str = "") -> None:
        if status is not None:
            speed = f", {rate}" if rate else ""
            status.update(f"{what}: {done}/{total}{speed}")
        elif done == total and not quiet:
            # The result has the rate.
            target.print(f"{what}: {total} rows", highlight=False)

    with status or nullcontext():
        yield update
