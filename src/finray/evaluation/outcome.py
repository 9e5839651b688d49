"""The result of an evaluation: scores with intervals, comparisons and answers; printed and written to files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Column

from finray.errors import FinrayError, ModelError
from finray.evaluation.overlap import Overlap
from finray.evaluation.statistics import Interval, Paired, p_text
from finray.files import replace_all
from finray.results import Result, Table, print_labelled

# A larger confusion matrix is only written to the file.
_MOST_CLASSES = 12
METRICS_FILE, PREDICTIONS_FILE = "metrics.json", "predictions.jsonl"


@dataclass(frozen=True, slots=True)
class ScoreEstimate:
    """A score and its 95 % interval."""

    value: float
    interval: Interval
    is_share: bool = False
    checks: dict[str, Any] = field(default_factory=dict)  # counts how those of ``pass_at_k`` ended
    rows: int | None = None  # number of rows that it is about, if not all

    def json(self) -> dict[str, Any]:
        """As JSON types."""
        span = self.interval
        ends = {"low": span.low, "high": span.high, "interval": span.method}
        more: dict[str, Any] = {"checks": self.checks} if self.checks else {}
        more |= {"rows": self.rows} if self.rows is not None else {}
        return {"value": self.value, **ends, **({"share": True} if self.is_share else {}), **more}

    def text(self, *, with_interval: bool = True) -> str:
        """Formatted for a table."""
        span = self.interval if with_interval else Interval(None, None, "")
        ends = "" if span.low is None or span.high is None else f" [{self._text(span.low)}, {self._text(span.high)}]"
        rows = f" of {self.rows:,}" if with_interval and self.rows is not None else ""
        return f"{self._text(self.value)}{'%' if self.is_share else ''}{ends}{rows}"

    def difference(self, value: float) -> str:
        """Format a difference of such scores."""
        return f"{100 * value:.1f} points" if self.is_share else f"{value:.4g}"

    def _text(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.is_share else f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class ModelScores:
    """One model: its scores by name, ``loss`` (nats per token of the answers) among them."""

    name: str
    scores: dict[str, ScoreEstimate]

    @property
    def metrics(self) -> dict[str, float]:
        """The values of all scores but the loss."""
        return {name: score.value for name, score in self.scores.items() if name != "loss"}

    @property
    def loss(self) -> float:
        """Nats per token of the answers."""
        return self.scores["loss"].value

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700.0))

    def json(self) -> dict[str, Any]:
        """As JSON types."""
        plain: dict[str, Any] = {name: score.json() for name, score in self.scores.items()}
        return {**plain, "perplexity": self.perplexity} if "loss" in plain else plain


@dataclass(frozen=True, slots=True)
class Compared:
    """A model against a baseline on one score."""

    score: str
    baseline: str
    rows: int
    test: Paired

    def json(self) -> dict[str, Any]:
        """As JSON types."""
        test = self.test
        counts = {} if test.gained is None else {"gained": test.gained, "lost": test.lost}
        span = {"low": test.interval.low, "high": test.interval.high}
        names = {"score": self.score, "baseline": self.baseline, "rows": self.rows}
        return {**names, "difference": test.difference, **span, "p": test.p, "test": test.method, **counts}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row as text, and each model's answer; a line of ``predictions.jsonl``."""

    row: int
    where: str
    prompt: str
    reference: str
    answers: dict[str, list[str]]
    scores: dict[str, dict[str, float]]
    rejected: str | None = None  # of a pair, whose chosen answer is the reference

    def json(self) -> dict[str, Any]:
        """As JSON types; a single answer is a text."""
        answers = {name: texts[0] if len(texts) == 1 else texts for name, texts in self.answers.items()}
        head = {"row": self.row, "where": self.where, "prompt": self.prompt, "reference": self.reference}
        pair = {} if self.rejected is None else {"rejected": self.rejected}
        return {**head, **pair, "answers": answers, "scores": self.scores}


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a part of an evaluation was computed in this call; what was kept from an earlier one does not count."""

    model: str  # name of the model
    part: str  # ``loss``, ``answers``, ``choices`` or ``labels``
    rows: int  # that were computed
    tokens: int  # that were scored or generated; for ``labels``, those of the texts
    seconds: float  # without loading the model

    def json(self) -> dict[str, Any]:
        """As JSON types."""
        seconds = max(self.seconds, 1e-6)
        return {**asdict(self), "rows_per_second": self.rows / seconds, "tokens_per_second": self.tokens / seconds}

    def text(self) -> str:
        """Rows and tokens per second."""
        seconds = max(self.seconds, 1e-6)
        return f"{self.rows / seconds:.1f} rows/s, {self.tokens / seconds:,.0f} tokens/s"


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Models on the same rows: baselines first, the evaluated model last.

    Attributes:
        models: with their scores.
        compared: the last model against each baseline, score by score.
        sentences: conclusions about the first score, one sentence per baseline.
        rows: number of rows.
        predictions: rows with their answers; empty if rows have no prompts.
        folder: where the results were written.
        overlap: rows that the last model was trained on; None if its training data is not known.
        held_out: the scores without these rows, by model.
        made_by: versions and settings that the results depend on.
        notes: remarks for the reader.
        classes: of a classifier, by id.
        confusion: by model, rows by their class (first index) and the predicted one.
        rates: of what this call computed, part by part.
        higher_is_better: by score; None where it is not known.
    """

    AS_IS: ClassVar[tuple[str, ...]] = ("predictions",)

    models: tuple[ModelScores, ...]
    compared: tuple[Compared, ...]
    sentences: tuple[str, ...]
    rows: int
    predictions: Sequence[Prediction]
    folder: Path
    overlap: Overlap | None = None
    held_out: tuple[ModelScores, ...] = ()
    made_by: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    confusion: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)

    @property
    def tuned(self) -> ModelScores:
        """The evaluated model."""
        return self.models[-1]

    @property
    def base(self) -> ModelScores:
        """The first baseline. Raises ModelError: there is none."""
        if len(self.models) < 2:
            raise ModelError("there is no baseline to compare with", repair="name one with --baseline")
        return self.models[0]

    def json(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        return {
            "format_version": 1,
            "rows": self.rows,
            "models": {model.name: model.json() for model in self.models},
            "comparisons": [{"model": self.tuned.name, **comparison.json()} for comparison in self.compared],
            "says": list(self.sentences),
            "higher_is_better": self.higher_is_better,
            "in_training_data": None if self.overlap is None else self.overlap.plain(),
            "without_training_rows": {model.name: model.json() for model in self.held_out} or None,
            **({"classes": list(self.classes), "confusion": self.confusion} if self.confusion else {}),
            "notes": list(self.notes),
            "rates": [rate.json() for rate in self.rates],
            "made_by": self.made_by,
        }

    def plain(self) -> dict[str, Any]:
        """Scores and answers as JSON types."""
        return {
            **self.json(),
            "folder": str(self.folder),
            "predictions": [prediction.json() for prediction in self.predictions],
        }

    def print(self, console: Console, *, samples: int = 3) -> None:
        """The table, the conclusions, and some answers side by side."""
        if self.models[-1].scores:
            console.print(self._table())
        if (matrix := self.confusion.get(self.tuned.name)) and len(self.classes) <= _MOST_CLASSES:
            console.print("rows by class (down) and prediction (across)")
            table = Table("", *(Column(name, justify="right", overflow="fold") for name in self.classes))
            for name, counts in zip(self.classes, matrix, strict=True):
                table.add_row(name, *(f"{count:,}" for count in counts))
            console.print(table)
        for line in self.sentences:
            console.print(line, highlight=False, soft_wrap=True)
        if self.overlap is not None and self.overlap.rows:
            overlap = self.overlap
            console.print(
                f"{len(overlap.rows)} of the {self.rows} rows are in the training data, whole or in part "
                f"({len(overlap.equal)} whole, {len(overlap.shared)} share runs of 13 words): scores on them may "
                "measure memorization",
                highlight=False,
                soft_wrap=True,
            )
            for row, other, share in overlap.named[:3]:
                console.print(f"  {row} is like {other} ({share:.0%} of it)", highlight=False, soft_wrap=True)
            for model in self.held_out:
                scores = ", ".join(f"{name.replace('_', ' ')} {score.text()}" for name, score in model.scores.items())
                console.print(f"  without them, {model.name}: {scores}", highlight=False, soft_wrap=True)
        for rate in self.rates:
            console.print(f"{rate.model} {rate.part}: {rate.text()}", highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)
        for prediction in self.predictions[:samples]:
            answers = [(name, texts[0]) for name, texts in prediction.answers.items()]
            expected = [("expected" if answers else "answer", prediction.reference)]
            if prediction.rejected is not None:
                expected = [("chosen", prediction.reference), ("rejected", prediction.rejected)]
            rewards = {
                name: [f"{score} {value:.4g}" for score, value in scores.items() if score.endswith("reward")]
                for name, scores in prediction.scores.items()
            }
            scored = [(name, ", ".join(each).replace("_", " ")) for name, each in rewards.items() if each]
            print_labelled(console, [("prompt", prediction.prompt), *expected, *answers, *scored])
        written = f"predictions: {self.folder / PREDICTIONS_FILE}"
        if not self.predictions:
            written = f"scores: {self.folder / METRICS_FILE} (these rows have no prompts)"
        console.print(f"\n{written}", highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title=f"{self.rows} rows; 95 % intervals", title_justify="left")
        table.add_column("")
        for model in self.models:
            table.add_column(model.name, justify="right")
        for other in self.models[:-1]:
            table.add_column("p" if len(self.models) == 2 else f"p against {other.name}", justify="right")
        p = {
            (row.score, row.baseline): p_text(row.test.p).removeprefix("p ").removeprefix("= ") for row in self.compared
        }
        for name in self.tuned.scores:
            cells = [model.scores[name].text() if name in model.scores else "" for model in self.models]
            table.add_row(
                name.replace("_", " "),
                *cells,
                *(p.get((name, model.name), "") for model in self.models[:-1]),
            )
            if name == "loss":
                table.add_row("perplexity", *(f"{model.perplexity:.3f}" for model in self.models))
        return table


def write(comparison: Comparison) -> None:
    """Write ``metrics.json`` and ``predictions.jsonl``.
    Raises FinrayError: they cannot be written; those of an earlier evaluation remain."""
    predictions, metrics = comparison.folder / PREDICTIONS_FILE, comparison.folder / METRICS_FILE
    contents = {metrics: json.dumps(comparison.json(), indent=2, ensure_ascii=False) + "\n"}
    # Empty, and not removed: then a copy behind a URL is replaced as well.
    if comparison.predictions or predictions.exists():
        lines = (json.dumps(prediction.json(), ensure_ascii=False) + "\n" for prediction in comparison.predictions)
        contents[predictions] = "".join(lines)
    try:
        replace_all({path: text.encode() for path, text in contents.items()})
    except OSError as error:
        raise FinrayError(
            f"the scores cannot be written: {error.strerror}",
            where=str(comparison.folder),
            repair="free some disk space, and run the same command again; it reuses answers that were saved",
        ) from None
