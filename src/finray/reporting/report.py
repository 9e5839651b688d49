"""The page of ``finray report``: one run, or several side by side, in one HTML file that works offline."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console

from finray.checkpoint.copies import push
from finray.checkpoint.objects import Objects
from finray.config.identity import flatten
from finray.config.paths import is_url
from finray.config.schema import Config
from finray.config.section import Section
from finray.errors import DataError
from finray.files import require_writable_file
from finray.limits import cut
from finray.records import TrainRecord
from finray.reporting.answers import explorer
from finray.reporting.page import render, write
from finray.reporting.plots import Mark, Plot, Series, curves, thinned
from finray.reporting.recorded import EARLIER_WEIGHTS, RecordedRun, read_run
from finray.reporting.scored import Evaluation, Scored
from finray.results import Result
from finray.tracking.console import duration, several

# Points of all curves of a plot in total; minimum and maximum per curve.
_POINTS, _FEWEST, _MOST = 16_000, 600, 16_000
# Maximum number of classes in a confusion matrix, the largest first.
_CLASSES = 30
# Maximum number of files with checksums.
_FILES = 60
_LEVELS = {"finished": "ok", "running": "note", "stopped": "warning", "not started": "note"}
_PHASES = (
    ("train", "training"),
    ("data_wait", "waiting for data"),
    ("evaluate", "evaluation"),
    ("checkpoint", "checkpoints"),
    ("load", "loading the model"),
    ("start_workers", "starting workers"),
    ("prepare", "preparing data"),
    ("start_ray", "starting Ray"),
)
# The curves: title, axis, and the value of a record.
_CURVES: tuple[tuple[str, str, Callable[[TrainRecord], float | None]], ...] = (
    ("Loss", "loss", lambda record: record.loss),
    ("Learning rate", "learning rate", lambda record: record.lr),
    ("Gradient norm", "gradient norm", lambda record: record.grad_norm),
    ("Throughput", "tokens/s", lambda record: record.tokens_per_s),
    ("Peak memory of rank 0", "GiB", lambda record: record.peak_memory_bytes / 2**30),
)
# System metrics of rank 0's machine: title, axis, pattern of the names, aggregation, and unit.
_MACHINE: tuple[tuple[str, str, str, Callable[[list[float]], float], float], ...] = (
    ("CPU, all cores", "%", r"cpu_percent", max, 1),
    ("Memory of rank 0's process", "GiB", r"rss_bytes", max, 2**30),
    ("GPU utilization, mean", "%", r"gpu\d+_percent", fmean, 1),
    ("GPU memory, largest", "GiB", r"gpu\d+_memory_bytes", max, 2**30),
    ("Power of all GPUs", "W", r"gpu\d+_power_watts", sum, 1),
    ("Network, sent and received", "MiB/s", r"network_\w+_bytes_per_s", sum, 2**20),
    ("Disk, read and written", "MiB/s", r"disk_\w+_bytes_per_s", sum, 2**20),
)


@dataclass(frozen=True, slots=True)
class Reported(Result):
    """A written page: its path, size, and runs."""

    output: str
    size: int
    runs: tuple[RecordedRun, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"output": self.output, "bytes": self.size, "runs": [run.plain() for run in self.runs]}

    def print(self, console: Console) -> None:
        """Problems with files, and the path of the page."""
        lines = [f"{run.name}: {problem}" for run in self.runs for problem in run.problems]
        lines.append(f"wrote {self.output} ({self.size / 2**20:.1f} MiB)")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


def report(runs: Sequence[str | Path], output: str | Path | None = None) -> Reported:
    """Write one page about a run, or about several side by side.

    Args:
        runs: run directories, or their URLs; at least one.
        output: the file; None means ``report.html`` in the run, or in the working directory for several runs.

    Raises:
        FinrayError: there is no such run, or the file cannot be written.
    """
    if not runs:
        raise DataError("no run is given", where="finray.report", repair="give a run directory, such as runs/my-run")
    given = None if output is None else Path(output).expanduser()
    if given is not None and given.is_dir():
        raise DataError("is a directory", where=f"--output {given}", repair="give a file in it")
    if given is not None:
        require_writable_file(given)
    recorded = tuple(read_run(place) for place in runs)
    target = given or (recorded[0].path if len(recorded) == 1 else Path()) / "report.html"
    if given is None and (target.is_symlink() or (target.exists() and not target.is_file())):
        # It would be written through, in a run of somebody else anywhere.
        raise DataError("is a link, or not a file", where=str(target), repair="remove it, or name a file with --output")
    require_writable_file(target)
    write(page(recorded), target)
    place = str(target)
    if given is None and len(recorded) == 1 and is_url(recorded[0].place):
        push(recorded[0].path, Objects(recorded[0].place), ["report.html"])
        place = f"{recorded[0].place}/report.html"
    return Reported(place, target.stat().st_size, recorded)


def page(runs: Sequence[RecordedRun], *, now: datetime | None = None) -> str:
    """The complete page of at least one run, with the time ``now`` (None: the current time) of its creation."""
    names = labels(runs)
    explored = explorer([(name, run.evaluations) for name, run in zip(names, runs, strict=True)])
    return render(
        resources.files("finray.reporting").joinpath("report.html.j2").read_text(encoding="utf-8"),
        scripts=("answers.js",),
        runs=list(zip(names, runs, strict=True)),
        one=runs[0] if len(runs) == 1 else None,
        levels=_LEVELS,
        facts=facts(runs[0]) if len(runs) == 1 else (),
        overview=[overview(run) for run in runs],
        plots=plots(runs),
        machine=machine_plots(runs),
        tables=tables(runs),
        matrices=[
            (f"{name}, {evaluation.name}" if evaluation.name else name, model, matrix_rows(evaluation, model))
            for name, run in zip(names, runs, strict=True)
            for evaluation in run.evaluations
            for model in evaluation.confusion
        ],
        explorer=explored,
        parts=[(name, phase_parts(run.phases)) for name, run in zip(names, runs, strict=True) if run.phases],
        starts=[(name, starts_of(run)) for name, run in zip(names, runs, strict=True) if run.starts],
        differences=config_differences(runs),
        changed=changed_fields(runs[0]) if len(runs) == 1 else (),
        made=[(name, run, made_by(run)) for name, run in zip(names, runs, strict=True)],
        duration=duration,
        now=when((now or datetime.now(UTC)).timestamp()),
    )


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each run: that of its directory, with as many parents as needed to make it unique."""
    parts, depth = [run.path.parts for run in runs], 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    # The same run twice.
    again = Counter[str]()
    for at, name in enumerate(names):
        again[name] += 1
        names[at] = name if again[name] == 1 else f"{name} ({again[name]})"
    return names


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """The setup of a run, as names and values."""
    config, start = run.config, run.starts[-1].header if run.starts else None
    data, mixed = config.get("data", {}), config.get("data", {}).get("mix")
    named = [source.get("source") for source in mixed if isinstance(source, dict)] if isinstance(mixed, list) else []
    pairs = [
        ("Model", _place(config.get("model", {}).get("name", "") or (start.model if start else ""))),
        ("Data", ", ".join(_place(source) for source in (data.get("source"), *named) if source)),
        ("Method", start.method if start else str(config.get("adapter", {}).get("method", ""))),
    ]
    if start is not None:
        pairs += [
            ("Trained", f"{start.trainable / 1e6:,.2f} M of {start.parameters / 1e6:,.1f} M parameters"),
            ("Rows", f"{start.rows:,}" + (f", {start.held_out:,} more held out" if start.held_out else "")),
            ("Batch", f"{several(start.global_batch_size, 'pack' if start.packing else 'row')} per step"),
            ("Workers", f"{start.world_size} × {start.device}, {start.precision}"),
        ]
    return [(name, value) for name, value in pairs if value]


def overview(run: RecordedRun) -> dict[str, str]:
    """The key numbers of a run; empty if they are not known."""
    first, last, best, total = run.train[:1], run.train[-1:], run.best, run.total_steps
    memory = run.summary.peak_memory_bytes if run.summary else tuple(record.peak_memory_bytes for record in last)
    seconds = run.summary.train_seconds if run.summary else sum(record.seconds for record in last)
    tokens = run.summary.tokens if run.summary else sum(record.tokens for record in last)
    return {
        "steps": f"{run.step:,}" + (f" of {total:,}" if total is not None and total != run.step else ""),
        "loss": f"{last[0].loss:.4f}" if last else "",
        "first_loss": f"{first[0].loss:.4f}" if first else "",
        "best": f"{best.value:.4g}" if best else "",
        "best_metric": best.metric.replace("_", " ") if best else "",
        "best_step": f"{best.step:,}" if best else "",
        "tokens": f"{tokens:,}" if tokens else "",
        "tokens_per_s": f"{tokens / seconds:,.0f}" if tokens and seconds else "",
        "time": duration(seconds) if seconds else "",
        "memory": f"{max(memory) / 2**30:.2f} GiB" if memory else "",
        "size": f"{run.size / 2**20:,.1f} MiB",
    }


Points = Sequence[tuple[int, float | None]]


def plots(runs: Sequence[RecordedRun]) -> list[Plot]:
    """The training curves, with a common x axis."""
    drawn = []
    for title, y_label, value in _CURVES:
        drawn += _curve(runs, title, y_label, [[(record.step, value(record)) for record in run.train] for run in runs])
        if title == "Loss":
            for metric in dict.fromkeys(name for run in runs for record in run.evals for name in record.metrics):
                label = metric.replace("_", " ")
                points = [
                    sorted((record.step, record.metrics[metric]) for record in run.evals if metric in record.metrics)
                    for run in runs
                ]
                drawn += _curve(runs, f"{label[:1].upper()}{label[1:]}", label, points)
    return drawn


def machine_plots(runs: Sequence[RecordedRun]) -> list[Plot]:
    """System metrics of rank 0's machine by step; the mean of several samples."""
    drawn = []
    for title, y_label, pattern, together, unit in _MACHINE:
        names = {
            name for run in runs for record in run.system for name in record.numbers if re.fullmatch(pattern, name)
        }
        points: list[Points] = []
        for run in runs:
            samples = dict[int, list[float]]()
            for record in run.system:
                if numbers := [record.numbers[name] for name in names if name in record.numbers]:
                    samples.setdefault(record.step, []).append(together(numbers) / unit)
            points.append([(step, fmean(values)) for step, values in sorted(samples.items())])
        drawn += _curve(runs, title, y_label, points)
    return drawn


def _curve(runs: Sequence[RecordedRun], title: str, y_label: str, points: Sequence[Points]) -> list[Plot]:
    """A plot with a curve for each run, whose colour is the same in all plots; empty if no run has a value."""
    most = min(_MOST, max(_FEWEST, _POINTS // len(runs)))
    # Seven digits are more than a screen shows.
    series = [
        thinned(
            Series(name, [x for x, _ in values], [None if y is None else float(f"{y:.7g}") for _, y in values], at),
            most,
        )
        for at, (name, values) in enumerate(zip(labels(runs), points, strict=True))
        if any(y is not None for _, y in values)
    ]
    if not series:
        return []
    marks = [mark for at, run in enumerate(runs) for mark in marks_of(run, at if len(runs) > 1 else None)]
    return [curves(series, title=title, x_label="step", y_label=y_label, group="run", marks=marks)]


def marks_of(run: RecordedRun, colour: int | None = None) -> list[Mark]:
    """The steps of restarts, and of changes of the number of workers."""
    marks: list[Mark] = []
    for before, after in zip(run.starts, run.starts[1:], strict=False):
        step, was, now = after.header.step, before.header.world_size, after.header.world_size
        label = "restart" if was == now else f"{was} → {now} workers"
        # Several starts from one step are one line; a change of the number of workers takes precedence.
        if marks and marks[-1].x == step:
            label = label if was != now else marks.pop().label
            marks = [mark for mark in marks if mark.x != step]
        marks.append(Mark(step, label, colour))
    return marks


def starts_of(run: RecordedRun) -> list[dict[str, str]]:
    """A description of each start of the workers."""
    return [
        {
            "when": when(start.time),
            "step": f"{start.header.step:,}",
            "workers": f"{start.header.world_size} × {start.header.device}",
            "batch": f"{start.header.micro_batch_size} × {start.header.accumulation} accumulation",
            "steps": f"{start.header.total_steps:,}",
        }
        for start in run.starts
    ]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Models as rows, scores as columns; ``spans`` scales the intervals between the smallest and the largest number."""

    title: str
    rows: int
    scores: list[str]
    lines: list[tuple[str, str, bool, list[tuple[Scored, tuple[float, float, float] | None] | None]]]
    says: list[str]
    notes: list[str]
    differences: list[tuple[str, ...]]


def tables(runs: Sequence[RecordedRun]) -> list[ScoreTable]:
    """Evaluations of the same name side by side, for all runs."""
    names, score_tables = labels(runs), []
    for title in dict.fromkeys(evaluation.name for run in runs for evaluation in run.evaluations):
        evaluations = [
            (name, evaluation)
            for name, run in zip(names, runs, strict=True)
            for evaluation in run.evaluations
            if evaluation.name == title
        ]
        scores = list(dict.fromkeys(score for _, evaluation in evaluations for score in evaluation.scores))
        spans = {
            score: _span(
                [
                    evaluation.models[model][score]
                    for _, evaluation in evaluations
                    for model in evaluation.models
                    if score in evaluation.models[model]
                ]
            )
            for score in scores
        }
        lines = [
            (
                name if len(runs) > 1 else "",
                model,
                model == evaluation.tuned,
                [
                    (values[score], _placed(values[score], spans[score])) if score in values else None
                    for score in scores
                ],
            )
            for name, evaluation in evaluations
            for model, values in evaluation.models.items()
        ]
        prefix = "{}: " if len(runs) > 1 else ""
        score_tables.append(
            ScoreTable(
                title or "Held-out rows",
                max(evaluation.rows for _, evaluation in evaluations),
                [score.replace("_", " ") for score in scores],
                lines,
                [prefix.format(name) + text for name, evaluation in evaluations for text in evaluation.says],
                # Most are the same for all runs.
                list(
                    dict.fromkeys(
                        prefix.format(name) + text if text == EARLIER_WEIGHTS else text
                        for name, evaluation in evaluations
                        for text in evaluation.notes
                    )
                ),
                [line for name, each in evaluations for line in _difference_lines(name if len(runs) > 1 else "", each)],
            )
        )
    return score_tables


def _difference_lines(run: str, part: Evaluation) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for each in part.differences:
        shown = part.models.get(part.tuned, {}).get(each.score, Scored(0.0))

        def text(value: float | None, shown: Scored = shown) -> str:
            if value is None:
                return ""
            return f"{100 * value:+.1f} points" if shown.is_share else f"{value:+.4g}"

        ends = "" if each.low is None or each.high is None else f"{text(each.low)} to {text(each.high)}"
        p = "< 0.001" if each.p < 0.001 else f"{each.p:.3f}"
        lines.append(
            (run, each.score.replace("_", " "), f"{part.tuned} against {each.baseline}", text(each.difference), ends, p)
        )
    return lines


def _span(scores: Sequence[Scored]) -> tuple[float, float]:
    if all(score.is_share for score in scores):
        return 0.0, 1.0
    ends = [value for score in scores for value in (score.value, score.low, score.high) if value is not None]
    return min(ends), max(ends)


def _placed(score: Scored, span: tuple[float, float]) -> tuple[float, float, float] | None:
    """Positions of the interval's ends and of the value in percent; None if there is nothing to place."""
    low, high = span
    if score.low is None or score.high is None or high <= low:
        return None
    ends = [round(100 * (value - low) / (high - low), 2) for value in (score.low, score.high, score.value)]
    return ends[0], ends[1], ends[2]


def matrix_rows(evaluation: Evaluation, model: str) -> dict[str, Any]:
    """A confusion matrix: class names, and for each class its rows by prediction with their share."""
    matrix = evaluation.confusion[model]
    order = sorted(range(len(matrix)), key=lambda at: -sum(matrix[at]))[:_CLASSES]
    order = sorted(order)
    return {
        "classes": [cut(evaluation.classes[at], 40) for at in order],
        "left_out": len(matrix) - len(order),
        "lines": [[(matrix[row][at], matrix[row][at] / (sum(matrix[row]) or 1)) for at in order] for row in order],
    }


Part = tuple[str, str, str, float]


def phase_parts(phases: Mapping[str, float]) -> list[Part]:
    """Time by phase, as CSS class, label, time and share."""
    seconds = dict(phases)
    total = seconds.pop("total", 0.0)
    seconds["train"] = max(0.0, seconds.get("train", 0.0) - seconds.get("data_wait", 0.0))
    timed = [
        (f"{at}", label, seconds[name]) for at, (name, label) in enumerate(_PHASES, 1) if seconds.get(name, 0.0) > 0
    ]
    rest = total - sum(took for *_, took in timed)
    if rest > 0.005 * total:
        timed.append(("rest", "other", rest))
    whole = sum(took for *_, took in timed) or 1.0
    return [(key, label, duration(took) if took >= 1 else f"{took:.2f}s", took / whole) for key, label, took in timed]


def config_differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Fields in which configs differ: the value of each run, and whether it differs from the first."""
    if len(runs) < 2:
        return []
    flat = [flatten({section: dict(values) for section, values in run.config.items()}) for run in runs]
    resolved = [{f"resolved.{name}": value for name, value in run.resolved.items()} for run in runs]
    differences = []
    for source in (flat, resolved):
        for path in dict.fromkeys(path for fields in source for path in fields):
            texts = [shown(fields[path]) if path in fields else "–" for fields in source]
            if len(set(texts)) > 1:
                differences.append((path, [(cut(text), text != texts[0]) for text in texts]))
    return differences


def changed_fields(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Fields with non-default values: path, value, default."""
    changed = []
    for name, info in Config.model_fields.items():
        kind = info.annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            continue
        for field, value in run.config.get(name, {}).items():
            field_info = kind.model_fields.get(field)
            default = (
                None
                if field_info is None or field_info.is_required()
                else field_info.get_default(call_default_factory=True)
            )
            if isinstance(default, Section):
                default = default.model_dump(mode="json")
            if shown(value) != shown(default):
                usual = "" if field_info is None or field_info.is_required() else shown(default)
                changed.append((f"{name}.{field}", cut(shown(value)), usual))
    return changed


def shown(value: Any) -> str:
    """A value of a config as text."""
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class MadeBy:
    """What a run depends on, and how to reproduce it."""

    command: str
    config: str
    versions: tuple[tuple[str, str], ...]  # of Python and packages, of the last start
    identities: tuple[tuple[str, str], ...]
    folder: str
    files: tuple[tuple[str, int, str], ...]  # of the finished model or the newest checkpoint, with their SHA-256
    more_files: int


def made_by(run: RecordedRun) -> MadeBy:
    """Collect what a run depends on."""
    versions = dict(run.starts[-1].versions) if run.starts else {}
    for evaluation in run.evaluations:
        packages = evaluation.made_by.get("versions")
        versions = versions or (
            {str(name): str(text) for name, text in packages.items()} if isinstance(packages, dict) else {}
        )
    folder, files = ("", []) if run.content is None else (run.content[0], run.content[1]["files"])
    revision = run.config.get("model", {}).get("revision")
    identities = (
        ("run id", run.run_id or ""),
        ("model revision", str(revision or "")),
        ("seed", str(run.config.get("run", {}).get("seed", ""))),
        ("prepared data, SHA-256", run.data or ""),
        ("step of final/", str(run.chosen_step) if run.chosen_step is not None else ""),
    )
    return MadeBy(
        command=f"finray train {run.path / 'config.yaml'}" if run.config else "",
        config=yaml.safe_dump(
            {name: dict(values) for name, values in run.config.items()}, sort_keys=False, allow_unicode=True
        )
        if run.config
        else "",
        versions=tuple(versions.items()),
        identities=tuple((name, value) for name, value in identities if value),
        folder=folder,
        files=tuple((file["path"], file["bytes"], file["sha256"]) for file in files[:_FILES]),
        more_files=max(0, len(files) - _FILES),
    )


def when(seconds: float) -> str:
    """A time as text, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def _place(name: object) -> str:
    """Short name of a model or source: of a local path the last two components; the config on the page has all of
    it."""
    path = Path(str(name))
    return str(Path(*path.parts[-2:])) if path.is_absolute() else str(name)
