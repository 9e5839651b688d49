"""Reads the results of ``finray evaluate`` in a run: scores with intervals, comparisons, and answers per row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from finray.errors import DataError
from finray.evaluation.outcome import PREDICTIONS_FILE
from finray.files import FileKind, lines_of, loads

_FILES = FileKind(DataError, repair="run `finray evaluate` again")


class _Metrics(TypedDict):
    rows: int
    models: dict[str, dict[str, Any]]
    comparisons: NotRequired[list[dict[str, Any]]]
    says: NotRequired[list[str]]
    higher_is_better: NotRequired[dict[str, bool | None]]
    notes: NotRequired[list[str]]
    classes: NotRequired[list[str]]
    confusion: NotRequired[dict[str, list[list[int]]]]
    made_by: NotRequired[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A score of a model, with its 95 % interval, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    is_share: bool = False
    # That it is about, if not all.
    rows: int | None = None

    def text(self, value: float | None = None) -> str:
        """Format the score, or a value of its kind."""
        of = f" of {self.rows:,}" if value is None and self.rows is not None else ""
        value = self.value if value is None else value
        if self.is_share:
            return f"{100 * value:.1f}%{of}"
        return f"{value:.4g}{of}" if abs(value) < 1000 else f"{value:,.1f}{of}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The evaluated model against a baseline, on one score."""

    score: str
    baseline: str
    difference: float
    low: float | None
    high: float | None
    p: float


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """A row, and each model's answer."""

    key: tuple[str, str]  # the same for the same row in another run
    where: str
    prompt: str
    reference: str
    answers: Mapping[str, str]  # by model; the first of several
    scores: Mapping[str, Mapping[str, float]]  # by model and score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation; models by name, baselines first, the evaluated one last."""

    name: str  # the directory below ``evaluation/``; empty for the run's own held-out rows
    rows: int
    models: Mapping[str, Mapping[str, Scored]]
    differences: tuple[Difference, ...]
    says: tuple[str, ...]
    notes: tuple[str, ...]
    classes: tuple[str, ...]
    confusion: Mapping[str, tuple[tuple[int, ...], ...]]
    made_by: Mapping[str, Any]
    answered: tuple[AnsweredRow, ...] = ()
    # By score, None where it is not known; empty for evaluations of earlier versions.
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)

    @property
    def tuned(self) -> str:
        """The name of the evaluated model."""
        return next(reversed(list(self.models)), "")

    @property
    def scores(self) -> list[str]:
        """Names of all scores, in order."""
        return list(dict.fromkeys(name for model in self.models.values() for name in model))


def read_evaluation(file: Path, root: Path, *, with_answers: bool = True) -> Evaluation:
    """Read an evaluation from its ``metrics.json`` and the files next to it.

    Args:
        file: ``metrics.json``.
        root: the directory ``evaluation`` of the run, in which all files must lie.
        with_answers: also read the answers.

    Raises:
        DataError: a file is damaged.
    """
    plain = _FILES.json(file, _Metrics, root.parent)
    classes = tuple(plain.get("classes", ()))
    confusion = {
        name: tuple(map(tuple, matrix))
        for name, matrix in plain.get("confusion", {}).items()
        if len(matrix) == len(classes) and all(len(line) == len(classes) for line in matrix)
    }
    answers = file.with_name(PREDICTIONS_FILE)
    return Evaluation(
        name="" if file.parent == root else file.parent.relative_to(root).as_posix(),
        rows=plain["rows"],
        models={name: _scores(scores) for name, scores in plain["models"].items()},
        differences=tuple(filter(None, map(_difference, plain.get("comparisons", ())))),
        says=tuple(plain.get("says", ())),
        notes=tuple(plain.get("notes", ())),
        classes=classes,
        confusion=confusion,
        made_by=plain.get("made_by", {}),
        answered=tuple(_answered(answers, root.parent)) if with_answers and answers.exists() else (),
        higher_is_better=plain.get("higher_is_better", {}),
    )


def _scores(plain: Mapping[str, Any]) -> dict[str, Scored]:
    scores = {}
    for name, score in plain.items():
        if (value := _number(score)) is not None:
            scores[name] = Scored(value)
        elif isinstance(score, dict) and (value := _number(score.get("value"))) is not None:
            ends = _number(score.get("low")), _number(score.get("high"))
            rows = score.get("rows") if isinstance(score.get("rows"), int) else None
            scores[name] = Scored(value, *ends, score.get("share") is True, rows)
    return scores


def _difference(plain: Mapping[str, Any]) -> Difference | None:
    difference, p = _number(plain.get("difference")), _number(plain.get("p"))
    if difference is None or p is None:
        return None
    names = str(plain.get("score")), str(plain.get("baseline"))
    return Difference(*names, difference, _number(plain.get("low")), _number(plain.get("high")), p)


def _answered(file: Path, root: Path) -> Iterator[AnsweredRow]:
    """Rows of a predictions file; damaged or unfinished lines are skipped."""
    seen: dict[tuple[str, str], int] = {}
    with _FILES.opened(file, root) as stream:
        for line in lines_of(stream):
            try:
                plain = loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(plain, dict) or not all(
                isinstance(plain.get(part), dict) for part in ("answers", "scores")
            ):
                continue
            where, reference = str(plain.get("where", "")), str(plain.get("reference", ""))
            if "rejected" in plain:
                reference += f"\n\nrejected: {plain['rejected']}"
            # A source row may occur several times, and two files may have rows with the same name.
            count = seen[where, reference] = seen.get((where, reference), -1) + 1
            yield AnsweredRow(
                (where, f"{count} {reference}"),
                where,
                str(plain.get("prompt", "")),
                reference,
                {str(name): _first(texts) for name, texts in plain["answers"].items()},
                {
                    str(name): {score: x for score, value in scores.items() if (x := _number(value)) is not None}
                    for name, scores in plain["scores"].items()
                    if isinstance(scores, dict)
                },
            )


def _first(texts: Any) -> str:
    return str(texts[0] if isinstance(texts, list) and texts else texts)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None
