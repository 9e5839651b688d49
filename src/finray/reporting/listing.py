"""Runs in a terminal: a list, a comparison of two, and following one in progress."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finray.checkpoint.objects import Objects
from finray.checkpoint.rundir import CONFIG_FILE
from finray.config import RUNS
from finray.config.paths import copy_path, is_url
from finray.errors import CheckpointError, DataError
from finray.files import first_line, opened
from finray.limits import cut
from finray.records import Record, RunHeader, TrainRecord
from finray.reporting.recorded import (
    DAMAGE,
    EARLIER_WEIGHTS,
    RecordedRun,
    eval_of,
    is_held,
    note_of,
    read_run,
    runs_in,
    train_of,
)
from finray.reporting.report import config_differences, labels
from finray.results import Result, Table
from finray.tracking.console import RunView, duration
from finray.tracking.jsonl import FILE as RECORDS
from finray.tracking.jsonl import parsed
from finray.tracking.starts import read_starts

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Listed(Result):
    """Runs of a directory, most recently changed first; ``now`` is seconds since 1970.

    ``unreadable`` has a sentence for each that cannot be read at all.
    """

    folder: str | Path
    runs: tuple[RecordedRun, ...]
    now: float
    unreadable: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        runs = [run.plain() for run in self.runs]
        return {"folder": str(self.folder), "runs": runs, "unreadable": list(self.unreadable)}

    def print(self, console: Console) -> None:
        """A table."""
        if not self.runs and not self.unreadable:
            start = "start one with: finray train CONFIG (`finray init my-run.yaml` writes a config)"
            console.print(f"no runs in {self.folder}; {start}", highlight=False, soft_wrap=True, markup=False)
            return
        table = Table()
        table.add_column("run")
        for name in ("state", "step", "loss", "best", "size", "changed"):
            table.add_column(name, justify="left" if name == "state" else "right")
        for run in self.runs:
            best, total = run.best, run.total_steps
            table.add_row(
                shown_name(run),
                run.state,
                f"{run.step:,}" + (f"/{total:,}" if total is not None else ""),
                f"{run.train[-1].loss:.4f}" if run.train else "",
                f"{best.metric.replace('_', ' ')} {best.value:.4g}" if best else "",
                size(run.size),
                f"{age(self.now - run.changed)} ago",
            )
        console.print(table)
        for run in self.runs:
            for problem in run.problems:
                console.print(f"{run.name}: {problem}", highlight=False, soft_wrap=True)
        for problem in self.unreadable:
            console.print(problem, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class RunsCompared(Result):
    """Two runs: differing fields of their configs, and their results."""

    runs: tuple[RecordedRun, RecordedRun]

    @property
    def results(self) -> dict[str, tuple[float | None, float | None]]:
        """Results of both runs by name."""
        by_name: dict[str, list[float | None]] = {}
        for at, run in enumerate(self.runs):
            for name, value in _results(run).items():
                by_name.setdefault(name, [None, None])[at] = value
        return {name: (values[0], values[1]) for name, values in by_name.items()}

    @property
    def notes(self) -> list[str]:
        """Which scores are of earlier weights."""
        return [
            f"{name}: {evaluation.name or 'held-out rows'}: {EARLIER_WEIGHTS}"
            for name, run in zip(labels(self.runs), self.runs, strict=True)
            for evaluation in run.evaluations
            if EARLIER_WEIGHTS in evaluation.notes
        ]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        fields = {path: [text for text, _ in cells] for path, cells in config_differences(self.runs)}
        results = {name: list(values) for name, values in self.results.items()}
        plain = [run.plain() for run in self.runs]
        return {"runs": plain, "config": fields, "results": results, "notes": self.notes}

    def print(self, console: Console) -> None:
        """Two tables, and notes."""
        names = labels(self.runs)
        differ = config_differences(self.runs)
        table = Table(title="config" if differ else "the configs are the same", title_justify="left")
        for name in ("field", *names):
            table.add_column(name)
        for path, cells in differ:
            table.add_row(path, *(text for text, _ in cells))
        console.print(table)
        table = Table(title="results", title_justify="left")
        table.add_column("")
        for name in (*names, "difference"):
            table.add_column(name, justify="right")
        table.add_row("state", *(run.state for run in self.runs), "")
        for name, (first, second) in self.results.items():
            apart = "" if first is None or second is None else f"{second - first:+.4g}"
            shown = ("" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.5g}" for x in (first, second))
            table.add_row(name, *shown, apart)
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True, markup=False)


def shown_name(run: RecordedRun) -> str:
    """A name of a run that any command takes: its name below ``runs/`` here, else its path or URL."""
    here = Path.cwd()
    if is_url(run.place) or not run.path.is_relative_to(here):
        return run.place
    path = run.path.relative_to(here)
    return str(path.relative_to(RUNS) if path.parts[:1] == (RUNS,) and len(path.parts) == 2 else path)


def list_runs(folder: str | Path, *, now: float) -> Listed:
    """The runs of a directory, or behind a URL.
    Raises DataError: the directory does not exist; StorageError: the storage cannot be reached."""
    places: Sequence[str | Path]
    if is_url(str(folder)):
        objects = Objects(str(folder))
        # Behind a URL, a folder with a config is a run.
        names = [folder for folder in objects.folders() if objects.read(f"{folder}/{CONFIG_FILE}") is not None]
        places = [objects.at(name) for name in names]
    else:
        places = runs_in(Path(folder))
    runs, unreadable = list[RecordedRun](), list[str]()
    for place in places:
        try:
            runs.append(read_run(place, with_answers=False))
        except (DataError, CheckpointError) as error:
            unreadable.append(f"{Path(place).name}: {error.message}")
        except (OSError, *DAMAGE) as error:
            unreadable.append(f"{Path(place).name}: cannot be read: {type(error).__name__}: {cut(first_line(error))}")
    return Listed(folder, tuple(sorted(runs, key=lambda run: (-run.changed, run.name))), now, tuple(unreadable))


def compare_runs(first: str | Path, second: str | Path) -> RunsCompared:
    """Compare two runs. Raises DataError: one of them is not a run."""
    return RunsCompared((read_run(first, with_answers=False), read_run(second, with_answers=False)))


def _results(run: RecordedRun) -> dict[str, float]:
    results: dict[str, float] = {"step": run.step}
    if run.train:
        last = run.train[-1]
        results |= {
            "loss at the last step": last.loss,
            "tokens": last.tokens,
            "training seconds": round(last.seconds, 2),
        }
        if last.seconds:
            results["tokens/s"] = round(last.tokens / last.seconds, 1)
        results["peak memory, GiB"] = max(record.peak_memory_bytes for record in run.train) / 2**30
    if run.best is not None:
        results[f"best {run.best.metric.replace('_', ' ')}"] = run.best.value
    for evaluation in run.evaluations:
        place = f"{evaluation.name or 'held-out rows'}: "
        for name, score in evaluation.models.get(evaluation.tuned, {}).items():
            results[f"{place}{name.replace('_', ' ')}"] = score.value
    return {name: value for name, value in results.items() if math.isfinite(value)}


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def age(seconds: float) -> str:
    """Format an elapsed time, in its largest unit."""
    return f"{seconds / 86_400:.0f}d" if seconds >= 2 * 86_400 else duration(max(0.0, seconds))


# --- following a run ------------------------------------------------------------------------------------------------


class RecordFollower:
    """Returns new lines of a run's records on each call.

    A start of the workers replaces the file by one that ends where the run continues; records that were already
    returned are not repeated.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RECORDS
        self._run_dir = run_dir
        self._inode: int | None = None
        self._offset = 0
        self._starts = 0
        self._returned: set[int] = set()

    def new(self) -> Iterator[Record]:
        """New starts of the workers, and new records."""
        try:
            starts = read_starts(self._run_dir)
        except OSError:
            starts = []
        for start in starts[self._starts :]:
            yield start.header
        self._starts = len(starts)
        try:
            with opened(self._path, self._run_dir) as stream:
                inode = os.fstat(stream.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                stream.seek(self._offset)
                content = stream.read()
        except OSError:
            return
        # A line that is being written has no line end yet.
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if (key := hash(line)) in self._returned:
                continue
            self._returned.add(key)
            plain = parsed(line)
            record = None if plain is None else train_of(plain) or eval_of(plain) or note_of(plain)
            if record is not None:
                yield record


@dataclass(frozen=True, slots=True)
class Watched(Result):
    """The state of a run when watching ended."""

    run: RecordedRun

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return self.run.plain()

    def print(self, console: Console) -> None:
        """In a line."""
        run, best = self.run, self.run.best
        total = f" of {run.total_steps:,}" if run.total_steps is not None else ""
        loss = f", loss {run.train[-1].loss:.4f}" if run.train else ""
        chosen = f", best {best.metric.replace('_', ' ')} {best.value:.4g} at step {best.step}" if best else ""
        console.print(f"{run.name}: {run.state} at step {run.step:,}{total}{loss}{chosen}", highlight=False)
        if run.state == "stopped" and run.failure:
            console.print(f"last error: {run.failure}", highlight=False, soft_wrap=True)


def watch(
    place: str | Path,
    view: RunView,
    *,
    sleep: Callable[[float], None] = time.sleep,
    held: Callable[[Path], bool] = is_held,
) -> Watched:
    """Show a run until no process works on it.

    Args:
        place: the run directory, or its URL: for a run on another machine only its current state is shown.
        view: shows the records.
        sleep: sleeps for the given seconds.
        held: whether a process is working on the run.

    Raises:
        DataError: there is no run.
    """
    run_dir = read_run(place, with_answers=False).path
    if is_url(str(place)) and held(workers_copy := copy_path(str(place))):
        run_dir = workers_copy
    follower = RecordFollower(run_dir)
    while True:
        # Checked before the records are read, so that everything written until then is shown.
        goes_on = held(run_dir)
        for record in latest(list(follower.new())):
            view.handle(record)
        if not goes_on:
            return Watched(read_run(run_dir, with_answers=False))
        sleep(POLL_S)


def latest(records: list[Record], most: int = 50) -> list[Record]:
    """Drop all but the last training records and the last header, for viewers that start late; everything else is
    kept."""
    passed = {at for at, record in enumerate(records) if isinstance(record, TrainRecord)}
    passed -= set(sorted(passed)[-most:])
    passed |= set([at for at, record in enumerate(records) if isinstance(record, RunHeader)][:-1])
    return [record for at, record in enumerate(records) if at not in passed]
