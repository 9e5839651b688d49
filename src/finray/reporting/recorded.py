"""Reads a run directory, complete or partial, finished or in progress, into typed records for all displays of runs.

A broken file raises no error: it is skipped, and named in ``problems``.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from finray.checkpoint import manifest
from finray.checkpoint.copies import EVALUATION, FAILURES, RUN_ID, is_run, local_copy, named_run
from finray.checkpoint.rundir import CONFIG_FILE, RESOLVED_FILE, RunDir
from finray.checkpoint.store import CheckpointStore
from finray.config.load import read_yaml
from finray.config.paths import copy_path, is_url
from finray.config.redact import redact
from finray.config.tasks import mode_of
from finray.config.trust import RUN_FILES
from finray.errors import DataError, FinrayError, did_you_mean_path
from finray.evaluation.outcome import METRICS_FILE
from finray.files import FileKind, first_line, loads, opened
from finray.limits import cut
from finray.records import EvalRecord, Note, RunSummary, SystemRecord, TrainRecord
from finray.reporting.scored import Evaluation, read_evaluation
from finray.tracking.jsonl import FILE as RECORDS
from finray.tracking.jsonl import read_whole
from finray.tracking.starts import Start, read_starts

T = TypeVar("T")
State = Literal["running", "finished", "stopped", "not started"]
# Added to the notes of an evaluation.
EARLIER_WEIGHTS = "final/ has changed since these scores were made: run `finray evaluate` again"
_FILES = FileKind(DataError)
# What values raise that are of another kind than those that finray writes.
DAMAGE = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
_NUMBERS = frozenset(field.name for field in fields(TrainRecord)) - {"samples_digest", "samples", "means"}
_MAY_LACK = frozenset(("grad_norm", "loss_scale", "skipped"))


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of the metric that selects checkpoints."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The records of a run.

    Attributes:
        path: the directory; for a run behind a URL the local copy.
        place: the directory, or the URL.
        config: sections with their fields, as in ``config.yaml``; empty if it cannot be read.
        resolved: the values of every ``auto``.
        starts: of the workers, in order; empty for versions that did not record them.
        train, evals, notes, system: records, in order.
        summary: of a finished run.
        chosen_step: step of the checkpoint that became ``final/``.
        failure: the last error of the last start, if the run failed.
        checkpoints: their steps.
        content: the manifest of ``final/``, else of the newest checkpoint; and its name.
        data: digest of the prepared rows, from the checkpoints.
        mode: from there too: whether less (``min``) or more of the metric is better that chooses among them.
        evaluations: results of ``finray evaluate``, the run's own held-out rows first.
        size: bytes on disk; hard links count once.
        changed: time of the last write, in seconds since 1970.
        problems: one sentence for each unreadable file.
    """

    path: Path
    place: str
    state: State
    config: Mapping[str, Mapping[str, Any]]
    resolved: Mapping[str, Any]
    run_id: str | None
    starts: tuple[Start, ...]
    train: tuple[TrainRecord, ...]
    evals: tuple[EvalRecord, ...]
    notes: tuple[Note, ...]
    system: tuple[SystemRecord, ...]
    summary: RunSummary | None
    chosen_step: int | None
    failure: str | None
    checkpoints: tuple[int, ...]
    content: tuple[str, manifest.Content] | None
    data: str | None
    mode: str | None
    evaluations: tuple[Evaluation, ...]
    size: int
    changed: float
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def step(self) -> int:
        """Optimizer steps known to be done."""
        done = [record.step for record in self.train[-1:]] + list(self.checkpoints[-1:])
        return max([*done, self.summary.step if self.summary else 0])

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if known."""
        if self.summary is not None:
            return self.summary.total_steps
        if self.starts:
            return self.starts[-1].header.total_steps
        steps = self.config.get("train", {}).get("max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def best(self) -> Best | None:
        """The best value so far of the metric that selects checkpoints; None without evaluations, or where it is not
        known whether less or more is better."""
        section = self.config.get("evaluation", {})
        metric = str((self.summary.best_metric if self.summary else None) or section.get("metric") or "eval_loss")
        mode = section.get("metric_mode") or self.mode or mode_of(metric)
        if mode not in ("min", "max"):
            return None
        values = [(record.metrics[metric], record.step) for record in self.evals if metric in record.metrics]
        values = [pair for pair in values if math.isfinite(pair[0])]
        if not values:
            return None
        value, step = min(values) if mode == "min" else max(values, key=lambda pair: (pair[0], -pair[1]))
        return Best(metric, value, step)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase: from the last start of a finished run, else from the records."""
        if self.summary is not None and self.summary.phases:
            return dict(self.summary.phases)
        train = self.train[-1].seconds if self.train else 0.0
        phases = {
            "train": train,
            "data_wait": sum(record.data_wait_s for record in self.train),
            "evaluate": sum(record.seconds for record in self.evals),
        }
        return {name: seconds for name, seconds in phases.items() if seconds > 0}

    def plain(self) -> dict[str, Any]:
        """A summary, as JSON types."""
        best = self.best
        return {
            "name": self.name,
            "path": self.place,
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "best_metric": None if best is None else best.metric,
            "best": None if best is None else best.value,
            "best_step": None if best is None else best.step,
            "loss": self.train[-1].loss if self.train else None,
            "bytes": self.size,
            "changed": self.changed,
            "problems": list(self.problems),
        }


def read_run(place: str | Path, *, with_answers: bool = True) -> RecordedRun:
    """Read a run directory in its current state.

    Args:
        place: the directory, or its URL.
        with_answers: also read the answers to held-out rows.

    Raises:
        DataError: the directory holds no run.
        CheckpointError: the URL holds no run.
        StorageError: the storage cannot be reached.
    """
    place = str(place).rstrip("/") if is_url(str(place)) else named_run(place)
    path = Path(local_copy(place, weights=False)).expanduser().absolute()
    if not is_run(path):
        what = (
            "holds no run" if path.is_dir() else "is no directory" if path.exists() else "the directory does not exist"
        )
        what += "" if path.exists() else did_you_mean_path(place)
        raise DataError(
            what, where=str(path), repair="give a run directory, such as runs/my-run; `finray runs` lists them"
        )
    problems: list[str] = []

    def tried(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except FinrayError as error:
            problems.append(f"{Path(error.where).name if error.where else path.name}: {error.message}")
        except OSError as error:
            problems.append(f"{Path(error.filename or path).name}: {(error.strerror or str(error)).lower()}")
        except DAMAGE as error:
            problems.append(f"{path.name}: a file is damaged: {type(error).__name__}: {cut(first_line(error))}")
        return otherwise

    run, store = RunDir(path), CheckpointStore(path)
    nothing: list[Any] = []
    raw, damaged = tried(lambda: read_whole(path / RECORDS), (nothing, 0))
    if damaged:
        problems.append(f"{RECORDS}: {damaged:,} damaged line{'s are' if damaged > 1 else ' is'} left out")
    finished = tried(run.finished, None)
    steps = tried(store.steps, nothing)
    starts = tuple(tried(lambda: read_starts(path), nothing))
    no_texts: dict[str, str] = {}
    counted = tried(lambda: _counted(store, steps), no_texts)
    is_begun = bool(raw or starts or steps or finished)
    # Its workers write another copy.
    held = copy_path(str(place)) if is_url(str(place)) else path
    state = state_of(is_held=is_held(held), is_finished=finished is not None, is_begun=is_begun)
    root, resolved, run_id = path / EVALUATION, path / RESOLVED_FILE, path / RUN_ID
    # A file that was downloaded has the time of that.
    final = None if is_url(str(place)) else run.final
    marks = (path, root, *(path / name for name in (CONFIG_FILE, *RUN_FILES)))
    # Those of the run's own held-out rows first.
    files = sorted(file for depth in ("", "*/", "*/*/") for file in root.glob(f"{depth}{METRICS_FILE}"))
    read = partial(_evaluation, root=root, final=final, with_answers=with_answers)
    evaluations = [tried(partial(read, file), None) for file in files]
    folders = [run.final, *(store.path_of(step) for step in reversed(steps))]
    folder = next((folder for folder in folders if (folder / manifest.NAME).is_file()), None)
    return RecordedRun(
        path=path,
        place=str(place) if is_url(str(place)) else str(path),
        state=state,
        config=tried(lambda: _sections(run.config_file), {}),
        resolved=tried(lambda: _FILES.json(resolved, dict[str, Any], path) if resolved.exists() else {}, {}),
        run_id=tried(lambda: _FILES.text(run_id).strip() if run_id.exists() else None, None),
        starts=starts,
        train=tuple(filter(None, map(train_of, raw))),
        evals=tuple(filter(None, map(eval_of, raw))),
        notes=tuple(filter(None, map(note_of, raw))),
        system=tuple(filter(None, map(system_of, raw))),
        summary=finished.summary if finished else None,
        chosen_step=finished.chosen_step if finished else None,
        failure=None if state in ("finished", "running") else tried(lambda: _failure(path / FAILURES), None),
        checkpoints=tuple(steps),
        content=None if folder is None else tried(lambda: (folder.name, manifest.read(folder)), None),
        data=counted.get("data") or None,
        mode=counted.get("metric_mode") or None,
        evaluations=tuple(evaluation for evaluation in evaluations if evaluation is not None),
        size=tried(lambda: size_of(path), 0),
        changed=tried(lambda: max([mark.stat().st_mtime for mark in marks if mark.exists()], default=0.0), 0.0),
        problems=tuple(problems),
    )


def runs_in(folder: Path) -> list[Path]:
    """Run directories below a directory, by name; the directory itself if it is one.
    Raises DataError: it does not exist, or cannot be read."""
    folder = folder.expanduser()
    if is_run(folder):
        return [folder]
    repair = "give the directory that run.output_dir names"
    if not folder.exists():
        raise DataError(f"the directory does not exist{did_you_mean_path(folder)}", where=str(folder), repair=repair)
    with FileKind(DataError, repair=repair).reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and is_run(path))


def state_of(*, is_held: bool, is_finished: bool, is_begun: bool) -> State:
    """The state of a run.

    Args:
        is_held: a `finray train` is working on it.
        is_finished: it has a summary.
        is_begun: it has any records.
    """
    if is_held:
        return "running"
    return "finished" if is_finished else "stopped" if is_begun else "not started"


def is_held(run_dir: Path) -> bool:
    """Whether a process on this machine is working on a run: it holds the lock next to the directory."""
    try:
        with opened(run_dir.with_name(f".{run_dir.name}.lock")) as stream:
            # A shared lock, released at once: a start at this moment waits only briefly.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def size_of(folder: Path) -> int:
    """Total size of all files below a directory; hard links count once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(Path(place) / name)
            except OSError:
                continue  # It was deleted meanwhile.
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        raise DataError("the file does not exist", where=str(path))
    plain = redact(read_yaml(path, path.parent))
    return {str(name): fields for name, fields in plain.items() if isinstance(fields, dict)}


def _evaluation(file: Path, *, root: Path, final: Path | None, with_answers: bool) -> Evaluation:
    """An evaluation, with a note if it is of earlier weights than those in ``final/``, where their times are known."""
    evaluation = read_evaluation(file, root, with_answers=with_answers)
    match evaluation.made_by:
        case {"model": {"weights": {"files": list(known)}}} if not evaluation.name.startswith("checkpoint-"):
            weights = [(file.name, file.stat()) for file in ([] if final is None else final.glob("*.safetensors"))]
            if any([name, stat.st_size, stat.st_mtime_ns] not in known for name, stat in weights):
                return replace(evaluation, notes=(*evaluation.notes, EARLIER_WEIGHTS))
    return evaluation


def _failure(path: Path) -> str | None:
    lines = _FILES.read(path).splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            plain = loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(plain, dict) and isinstance(plain.get("error"), str):
            return str(redact(plain["error"]))
    return None


def _counted(store: CheckpointStore, steps: Sequence[int]) -> dict[str, str]:
    """The texts in the newest state that a checkpoint has."""
    for step in reversed(steps):
        path = store.path_of(step) / "training_state" / "state.json"
        if path.exists():
            state = _FILES.json(path, dict[str, Any], store.run_dir)
            return {name: value for name, value in state.items() if isinstance(value, str)}
    return {}


def train_of(plain: Mapping[str, Any]) -> TrainRecord | None:
    """A training record; None if it is not one. Parsed by hand, because there may be thousands."""
    if plain.get("kind") != "train" or not isinstance(plain.get("samples_digest", ""), str):
        return None
    record: dict[str, Any] = {"samples_digest": plain.get("samples_digest", "")}
    for name in _NUMBERS:
        value = plain.get(name)
        if type(value) in (int, float) or (value is None and name in _MAY_LACK):
            record[name] = value
        else:
            return None
    others = plain.keys() - _NUMBERS - {"kind", "time", "samples_digest", "samples"}
    means = {name: float(plain[name]) for name in others if type(plain[name]) in (int, float)}
    return TrainRecord(**record, means=means)


def eval_of(plain: Mapping[str, Any]) -> EvalRecord | None:
    """An evaluation record; None if it is not one."""
    if plain.get("kind") != "eval":
        return None
    numbers = {name: float(value) for name, value in plain.items() if type(value) in (int, float)}
    metrics = {name: numbers[name] for name in EvalRecord.metrics_of(plain) if name in numbers}
    targets = numbers.get("eval_targets", 0.0)
    return EvalRecord(
        plain["step"], metrics, int(targets) if math.isfinite(targets) else 0, numbers.get("eval_seconds", 0.0)
    )


def note_of(plain: Mapping[str, Any]) -> Note | None:
    """A note; None if it is not one."""
    if plain.get("kind") not in ("note", "warning") or not isinstance(plain.get("message"), str):
        return None
    return Note(plain["message"], plain["step"], plain["kind"])


def system_of(plain: Mapping[str, Any]) -> SystemRecord | None:
    """A system record; None if it is not one."""
    if plain.get("kind") != "system" or type(plain.get("time")) not in (int, float):
        return None
    others = ("kind", "step", "time")
    numbers = {name: value for name, value in plain.items() if type(value) in (int, float) and name not in others}
    return SystemRecord(plain["step"], plain["time"], numbers)
