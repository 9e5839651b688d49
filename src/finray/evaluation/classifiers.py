"""A classifier's rows for ``finray evaluate``: what each model says of them, and scores as statistics of rows.

Statistics are over the evaluated model's classes, by their ids, whatever the order of another model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finray.config.resolved import LabelSet
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label
from finray.errors import DataError
from finray.evaluation.artifacts import inference_device
from finray.evaluation.classify import Classified, Prediction, classify
from finray.evaluation.rows import Rows
from finray.evaluation.scores.base import FloatArray, Score, SummedScore
from finray.evaluation.work import Progress, Subject
from finray.models.artifacts import load_artifact
from finray.models.packing_check import check_packing
from finray.tasks.classifier_scores import OF_CONFUSION, ScoreSums

# Numbers in the statistics of a score; of more classes or rows only the value is given.
_MOST_NUMBERS = 2**24
# What a model without an answer to the text says.
COMMONEST = "commonest"


class Mean(SummedScore):
    """A mean over the rows."""

    def __init__(self, *, is_share: bool, lower_is_better: bool = False) -> None:
        super().__init__()
        self.is_share, self.lower_is_better = is_share, lower_is_better


class FromCounts(SummedScore):
    """A score of the confusion matrix (C, C) that is the sum of the rows' own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of = OF_CONFUSION[name]
        self.is_share = name != "matthews_corrcoef"

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """The score, as the run's own evaluations have it."""
        classes = math.isqrt(len(sums_K))
        return self._of(sums_K.reshape(classes, classes))


@dataclass(frozen=True, slots=True)
class Judged:
    """What models made of the rows.

    Attributes:
        labels: of the evaluated model.
        totals: scores with statistics, by name.
        statistics: by model and score (N, K).
        values: by model, scores that have a value alone.
        predictions: by model, of each row.
        confusion: by model, rows by their class and the predicted one, where each row has one class.
    """

    labels: LabelSet
    totals: Mapping[str, Score]
    statistics: dict[str, dict[str, FloatArray]]
    values: dict[str, dict[str, float]]
    predictions: dict[str, tuple[Prediction, ...]]
    confusion: dict[str, tuple[tuple[int, ...], ...]]


def judge(
    subjects: Sequence[Subject],
    rows: Rows,
    *,
    labels: LabelSet | None,
    dtype: torch.dtype,
    tell: Callable[[str], None],
    progress: Progress,
) -> Judged:
    """Let classifiers judge rows, the evaluated one last; a model that is named for it says the commonest label.

    Args:
        subjects: the models; of a :data:`COMMONEST` nothing is loaded.
        rows: labelled ones.
        labels: of the evaluated model, where its run says; None reads them from its configuration.
        dtype: of weights and arithmetic.
        tell: told of what is left out.
        progress: told how far each model has come.

    Raises:
        FinrayError: a model cannot be loaded, or a row has a label that it does not know.
    """
    truths = [rows.split.labels[number] for number in rows.numbers]
    held = [rows.split.row(number) for number in rows.numbers]
    found: dict[str, Classified] = {}
    for subject in reversed(subjects):
        if subject.name == COMMONEST and found:
            continue
        model = load_artifact(subject.artifact, dtype=dtype).to(inference_device())
        own = labels if subject is subjects[-1] else None
        packs = check_packing(subject.artifact.model).safe
        told = _counted(progress, f"{subject.name} labels", len(held))
        found[subject.name] = classify(model, held, truths, packs=packs, labels=own, progress=told)
        del model
    last = found[subjects[-1].name]
    predictions = {subject.name: found[subject.name].predictions for subject in subjects if subject.name in found}
    if COMMONEST in (subject.name for subject in subjects) and rows.train is not None:
        said = Prediction(commonest(rows.train, last.labels))
        predictions = {COMMONEST: (said,) * len(held), **predictions}
    sums = ScoreSums(last.labels.problem, last.labels.names)
    totals, statistics = _statistics(sums, truths, predictions)
    if len(totals) == 1 and last.labels.problem == "single_label":
        tell(f"{len(sums.names)} classes are too many for intervals of more than accuracy")
    values: dict[str, dict[str, float]] = {}
    for name, one in found.items():
        metrics = {} if one.scores is None else one.scores.metrics
        values[name] = {score: value for score, value in metrics.items() if score not in totals}
    confusion = {name: one.scores.confusion for name, one in found.items() if one.scores and one.scores.confusion}
    return Judged(last.labels, totals, statistics, values, predictions, confusion)


def commonest(train: PreparedSplit, labels: LabelSet) -> Label:
    """What to say of any row without looking at it: the mean of numbers, the commonest class, those of most rows."""
    seen = train.labels
    if labels.problem == "regression":
        return float(np.mean([float(one) for one in seen if not isinstance(one, tuple)]))
    counts = Counter(name for one in seen for name in (one if isinstance(one, tuple) else (str(one),)))
    if labels.problem == "multi_label":
        return tuple(name for name in labels.names if 2 * counts[name] > len(seen))
    return counts.most_common(1)[0][0]


def _statistics(
    sums: ScoreSums, truths: Sequence[Label], predictions: Mapping[str, Sequence[Prediction]]
) -> tuple[dict[str, Score], dict[str, dict[str, FloatArray]]]:
    found: dict[str, dict[str, FloatArray]] = {name: {} for name in predictions}
    if sums.problem == "regression":
        for name, said in predictions.items():
            apart = [float(_number(one.label)) - float(_number(truth)) for one, truth in zip(said, truths, strict=True)]
            found[name]["mean_squared_error"] = np.square(apart)[:, None]
        return {"mean_squared_error": Mean(is_share=False, lower_is_better=True)}, found
    if sums.problem == "multi_label":
        right = [frozenset(one if isinstance(one, tuple) else (str(one),)) for one in truths]
        for name, said in predictions.items():
            hit = [
                set(one.label if isinstance(one.label, tuple) else ()) == truth
                for one, truth in zip(said, right, strict=True)
            ]
            found[name]["accuracy"] = np.array(hit, dtype=np.float64)[:, None]
        return {"accuracy": Mean(is_share=True)}, found
    place = {name: number for number, name in enumerate(sums.names)}
    truth_N = np.array([place[str(one)] for one in truths])
    classes, rows = len(place), len(truth_N)
    totals: dict[str, Score] = {"accuracy": Mean(is_share=True)}
    has_counts = rows * classes**2 <= _MOST_NUMBERS
    if has_counts:
        totals |= {name: FromCounts(name) for name in ("f1_macro", "f1_weighted", "matthews_corrcoef")}
    for name, said in predictions.items():
        try:
            said_N = np.array([place[str(one.label)] for one in said])
        except KeyError as error:
            raise DataError(
                f"`{name}` says {error.args[0]!r}, and the classes are {', '.join(sums.names)}",
                where="--baseline",
                repair="compare with a classifier of the same labels",
            ) from None
        found[name]["accuracy"] = (said_N == truth_N).astype(np.float64)[:, None]
        if has_counts:
            cells_NK = np.zeros((rows, classes**2))
            cells_NK[np.arange(rows), truth_N * classes + said_N] = 1
            found[name] |= dict.fromkeys(("f1_macro", "f1_weighted", "matthews_corrcoef"), cells_NK)
    return totals, found


def _number(label: Label) -> float:
    assert not isinstance(label, tuple)
    return float(label)


def _counted(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    return lambda done: progress(what, done, total=total)


def shown(label: Label) -> str:
    """A label as text."""
    return ", ".join(label) if isinstance(label, tuple) else f"{label:.4g}" if isinstance(label, float) else str(label)


def prediction_scores(judged: Judged, index: int) -> dict[str, dict[str, Any]]:
    """Of one row, by model: whether it is right, and the probability of what the model says."""
    found: dict[str, dict[str, Any]] = {}
    for name, said in judged.predictions.items():
        one = judged.statistics[name]
        kept = {score: float(values[index, 0]) for score, values in one.items() if values.shape[1] == 1}
        if said[index].probabilities:
            kept["probability"] = max(said[index].probabilities)
        found[name] = kept
    return found
