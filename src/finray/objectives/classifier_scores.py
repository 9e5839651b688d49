"""Scores of a classifier: sums that are added up on the device, and scores from them that equal scikit-learn's.

Counts are enough for most. AUROC and the correlations need all rows at once: for these each row has a slot in the same
vector, with its label and its score, and the sum over the ranks puts them together. Logits are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from finray.config.resolved import Problem

Array = npt.NDArray[np.float64]
# Maximum number of labels and scores in slots (128 MiB); metrics that need more are left out.
MAX_SLOTS = 2**24


@dataclass(frozen=True, slots=True)
class ClassifierScores:
    """How a classifier did.

    Attributes:
        metrics: by name; one that the rows do not define (AUROC of rows of one class, say) is left out.
        confusion: rows by their class (first index) and the predicted one, where each row has one class.
    """

    metrics: Mapping[str, float]
    confusion: tuple[tuple[int, ...], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """The vector in which an evaluation is summed.

    Args:
        problem: what is predicted.
        names: of the C classes, by id; none in a regression.
    """

    problem: Problem
    names: tuple[str, ...]

    def size(self, rows: int) -> int:
        """Length of the vector for this number of rows."""
        counts, width = self._layout()
        return counts + (rows * width if rows * width <= MAX_SLOTS else 0)

    def _layout(self) -> tuple[int, int]:
        """The number of counts, and of numbers in the slot of a row."""
        classes = len(self.names)
        if self.problem == "regression":
            return 0, 2
        if self.problem == "multi_label":
            return 2 + 3 * classes, 2 * classes
        return classes**2, 2 if classes == 2 else 1 + classes

    def add(self, sums: torch.Tensor, rows: Sequence[int], logits_SC: torch.Tensor, labels: torch.Tensor) -> None:
        """Add rows to ``sums`` (fp64): ``rows`` are their indices among the rows that are evaluated, from 0.

        Args:
            logits_SC: (S, C), or (S, 1) in a regression.
            labels: int64 (S) classes, (S, C) of 0 and 1, or (S) numbers.
        """
        (counts, width), classes, logits = self._layout(), len(self.names), logits_SC.double()
        if self.problem == "regression":
            kept = torch.stack([labels.double(), logits[:, 0]], dim=1)
        elif self.problem == "multi_label":
            truth, predicted = labels.bool(), logits > 0
            sums[0] += (truth == predicted).all(-1).sum()
            sums[1] += len(rows)
            cases = torch.stack([truth & predicted, ~truth & predicted, truth & ~predicted])
            sums[2:counts] += cases.sum(1).flatten()
            kept = torch.cat([labels.double(), logits.sigmoid()], dim=1)
        else:
            cell = labels * classes + logits.argmax(-1)
            sums[:counts].index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
            probabilities = logits.softmax(-1)
            kept = torch.cat([labels[:, None].double(), probabilities[:, 1:] if classes == 2 else probabilities], dim=1)
        if len(sums) > counts:
            sums[counts:].view(-1, width)[torch.tensor(rows, device=sums.device)] = kept

    def scores(self, sums: Sequence[float]) -> ClassifierScores:
        """The scores that follow from the sums over all rows."""
        (counts, width), classes = self._layout(), len(self.names)
        numbers = np.asarray(sums, dtype=np.float64)
        rows = numbers[counts:].reshape(-1, width)
        if self.problem == "regression":
            if not len(rows):
                return ClassifierScores({})
            truth, predicted = rows.T
            of_numbers = {
                "mean_squared_error": float(np.mean((truth - predicted) ** 2)),
                "pearson": _correlation(truth, predicted),
                "spearman": _correlation(_ranks(truth), _ranks(predicted)),
            }
            return ClassifierScores({name: one for name, one in of_numbers.items() if one is not None})
        if self.problem == "multi_label":
            hits, wrong, missed = numbers[2:counts].reshape(3, classes)
            metrics = {"accuracy": float(numbers[0] / numbers[1])}
            metrics |= self._by_class(hits, wrong, missed, np.ones(classes, dtype=bool))
            metrics |= _auroc(rows[:, :classes], rows[:, classes:])
            return ClassifierScores(metrics)
        confusion = numbers[:counts].reshape(classes, classes)
        hits, there, predicted = np.diag(confusion), confusion.sum(1), confusion.sum(0)
        metrics = self._by_class(hits, predicted - hits, there - hits, there + predicted > 0)
        metrics = {name: of(confusion) for name, of in CONFUSION_METRICS.items()} | metrics
        ids = np.arange(classes)[1:] if classes == 2 else np.arange(classes)
        metrics |= _auroc(rows[:, :1] == ids, rows[:, 1:])
        return ClassifierScores(metrics, tuple(tuple(int(one) for one in line) for line in confusion))

    def _by_class(self, hits: Array, wrong: Array, missed: Array, counts: npt.NDArray[np.bool_]) -> dict[str, float]:
        """F1, precision and recall; 0 where there is nothing to divide by, as scikit-learn has it."""
        precision, recall = (_ratio(hits, hits + other) for other in (wrong, missed))
        f1_macro, f1_weighted = f1_scores(hits, wrong, missed, counts)
        metrics = {"f1_macro": f1_macro, "f1_weighted": f1_weighted}
        for name, share, part in zip(self.names, precision.tolist(), recall.tolist(), strict=True):
            metrics |= {f"precision_{name}": share, f"recall_{name}": part}
        return metrics


def _ratio(above: npt.ArrayLike, below: npt.ArrayLike) -> Array:
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    result: Array = np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    return result


def f1_scores(hits: Array, wrong: Array, missed: Array, counts: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Macro and weighted F1: the mean over the classes, and over the rows.

    Args:
        hits: (C) rows of a class that are predicted to be.
        wrong: (C) rows that are predicted to be and are not.
        missed: (C) rows of a class that are not predicted to be.
        counts: (C) classes that count in the macro F1; those in neither labels nor predictions do not.
    """
    f1, support = _ratio(2 * hits, 2 * hits + wrong + missed), hits + missed
    return float(f1[counts].mean()), float(_ratio((f1 * support).sum(), support.sum()))


def _f1_of(confusion: Array) -> tuple[float, float]:
    hits, there, predicted = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    return f1_scores(hits, predicted - hits, there - hits, there + predicted > 0)


def _matthews(confusion: Array) -> float:
    """Of any number of classes (Gorodkin 2004)."""
    hits, total, there, predicted = np.trace(confusion), confusion.sum(), confusion.sum(1), confusion.sum(0)
    spread = (total**2 - there @ there) * (total**2 - predicted @ predicted)
    return float((hits * total - there @ predicted) / np.sqrt(spread)) if spread > 0 else 0.0


# What follows from rows (C, C) by their class (first index) and the predicted one.
CONFUSION_METRICS: dict[str, Callable[[Array], float]] = {
    "accuracy": lambda confusion: float(np.trace(confusion) / confusion.sum()),
    "f1_macro": lambda confusion: _f1_of(confusion)[0],
    "f1_weighted": lambda confusion: _f1_of(confusion)[1],
    "matthews_corrcoef": _matthews,
}


def _ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of theirs."""
    # Its import takes a second.
    from scipy.stats import rankdata

    ranks: Array = rankdata(values)
    return ranks


def _auroc(truth_NC: Array | npt.NDArray[np.bool_], scores_NC: Array) -> dict[str, float]:
    """Mean over the classes that some rows have and others have not, each against the rest (Mann and Whitney 1947)."""
    areas = []
    for truth, scores in zip(truth_NC.astype(bool).T, scores_NC.T, strict=True):
        there, others = int(truth.sum()), int((~truth).sum())
        if there and others:
            areas.append((_ranks(scores)[truth].sum() - there * (there + 1) / 2) / (there * others))
    return {"roc_auc": float(np.mean(areas))} if areas else {}


def _correlation(one: Array, other: Array) -> float | None:
    """Pearson's correlation; None if all numbers are equal."""
    one, other = one - one.mean(), other - other.mean()
    spread = float(np.sqrt(one @ one) * np.sqrt(other @ other))
    return float(np.clip(one @ other / spread, -1, 1)) if spread > 0 else None
