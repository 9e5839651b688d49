"""Classification: one class, several or a number for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.config.objectives import CLASSIFICATION
from finray.config.resolved import Execution, Problem, Resolved
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label
from finray.data.sampling.collate import LabelledBatch, Values
from finray.objectives.base import Objective
from finray.objectives.classifier_scores import ClassifierScores, ScoreSums
from finray.records import Confusion

# Classes of a confusion matrix in the records of a run.
_MOST_SHOWN = 12


class ClassificationObjective(Objective):
    """See :class:`finray.objectives.base.Objective`.

    Args:
        problem: what is predicted.
        labels: names of the classes, by id; none in a regression.
        class_weights: of each class in the loss; none where all count alike.
        label_smoothing: share of a target that is spread over all classes.
        device: of the model.
    """

    spec = CLASSIFICATION

    def __init__(
        self,
        problem: Problem,
        labels: tuple[str, ...],
        class_weights: tuple[float, ...] = (),
        label_smoothing: float = 0.0,
        *,
        device: torch.device,
    ) -> None:
        self.problem, self.sums = problem, ScoreSums(problem, labels)
        self._ids = {name: number for number, name in enumerate(labels)}
        self._class_weights = np.array(class_weights or [1.0] * len(labels))
        self._weight_C = torch.tensor(class_weights, device=device) if class_weights else None
        self._smoothing = label_smoothing
        # By split: ids of classes, lists of them, or numbers.
        self._labels: WeakKeyDictionary[PreparedSplit, Sequence[Any]] = WeakKeyDictionary()

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:
        """For the labels and the weights that were decided."""
        # Workers start once the data are prepared.
        assert isinstance(execution, Resolved)
        assert execution.problem is not None
        smoothing = config.classification.label_smoothing
        return cls(execution.problem, execution.labels, execution.class_weights, smoothing, device=device)

    def targets(self, labels: Sequence[Any]) -> npt.NDArray[Any]:
        """Ids of classes as int64, lists of them as fp32 (S, C) of 0 and 1, or numbers as fp32."""
        if self.problem != "multi_label":
            return np.array(labels, dtype=np.int64 if self.problem == "single_label" else np.float32)
        targets = np.zeros((len(labels), len(self._ids)), dtype=np.float32)
        for line, ids in zip(targets, labels, strict=True):
            line[list(ids)] = 1.0
        return targets

    def encode(self, label: Label) -> Any:
        """The id of a class, a tuple of them, or the number itself."""
        if isinstance(label, tuple):
            return tuple(self._ids[name] for name in label)
        return self._ids[label] if isinstance(label, str) else label

    def labels_of(self, split: PreparedSplit) -> Sequence[Any]:
        """What :meth:`encode` gives for each row."""
        if split not in self._labels:
            self._labels[split] = [self.encode(label) for label in split.labels]
        return self._labels[split]

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.float64]:
        """Weight of each row's class, 1 where a row has no one class."""
        if self.problem != "single_label":
            return np.ones(len(split))
        weights: npt.NDArray[np.float64] = self._class_weights[np.array(self.labels_of(split), dtype=np.int64)]
        return weights

    def values(self, split: PreparedSplit, rows: Sequence[int]) -> Values:
        """The labels."""
        labels = self.labels_of(split)
        return {"labels": self.targets([labels[row] for row in rows])}

    def loss_sum(self, outputs: torch.Tensor, batch: LabelledBatch, sums: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The loss summed over rows, from logits (S, C); divided by the weight of the rows it is what torch calls
        ``mean``.

        Cross-entropy with the weights of classes and label smoothing; of a row with several classes the binary
        cross-entropy, meaned over all classes; of a number the squared error.
        """
        logits, labels = outputs.float(), batch.labels_S
        if self.problem == "regression":
            return F.mse_loss(logits[:, 0], labels, reduction="sum")
        if self.problem == "multi_label":
            labels = labels * (1 - self._smoothing) + self._smoothing / 2
            total = F.binary_cross_entropy_with_logits(logits, labels, weight=self._weight_C, reduction="sum")
            return total / logits.shape[1]
        return F.cross_entropy(logits, labels, weight=self._weight_C, label_smoothing=self._smoothing, reduction="sum")

    def metric_count(self, rows: int) -> int:
        """The loss and the weight of the rows, and what :class:`ScoreSums` keeps."""
        return 2 + self.sums.size(rows)

    def score(self, outputs: torch.Tensor, batch: LabelledBatch, sums: torch.Tensor) -> None:
        """Add the loss, the rows' weight, and what the other metrics count."""
        logits = outputs.float()
        sums[0] += self.loss_sum(logits, batch, sums[:0]).double()
        weighted = self._weight_C if self.problem == "single_label" else None
        sums[1] += len(batch.rows) if weighted is None else weighted[batch.labels_S].double().sum()
        self.sums.add(sums[2:], batch.rows, logits, batch.labels_S)

    def scores(self, sums: Sequence[float]) -> ClassifierScores:
        """Mean loss, the other metrics, and which class was taken for which."""
        scores = self.sums.scores(sums[2:])
        return replace(scores, metrics={"eval_loss": sums[0] / sums[1], **scores.metrics})

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of :meth:`scores`."""
        return dict(self.scores(sums).metrics)

    def confusion(self, sums: Sequence[float]) -> Confusion:
        """The matrix of :meth:`scores`; of many classes it would fill the run's records."""
        return [list(line) for line in self.scores(sums).confusion] if len(self._ids) <= _MOST_SHOWN else []
