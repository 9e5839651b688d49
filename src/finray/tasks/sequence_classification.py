"""Sequence classification: one class, several or a number for each row, over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.config.resolved import Execution, Problem, Resolved
from finray.config.schema import Config
from finray.config.tasks import SEQUENCE_CLASSIFICATION
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label
from finray.data.sampling.collate import LabelledBatch, collate_labelled
from finray.models.packed import PackedModel
from finray.records import Confusion
from finray.tasks.classifier_scores import ClassifierScores, ScoreSums
from finray.tasks.packed_task import PackedTask, built

# Classes of a confusion matrix in the records of a run.
_MOST_SHOWN = 12


class SequenceClassification(PackedTask):
    """A classifier in training; see :class:`finray.training.task.Task`.

    Args:
        problem: what is predicted.
        labels: names of the classes, by id; none in a regression.
        class_weights: of each class in the loss; none where all count alike.
        label_smoothing: share of a target that is spread over all classes.
    """

    spec = SEQUENCE_CLASSIFICATION

    def __init__(
        self,
        model: Any,
        *,
        precision: str,
        attention_name: str | None,
        device: torch.device,
        problem: Problem,
        labels: tuple[str, ...],
        class_weights: tuple[float, ...] = (),
        label_smoothing: float = 0.0,
    ) -> None:
        packed = PackedModel(model, precision=precision, attention_name=attention_name, device=device)
        super().__init__(packed, self.logits_SC)
        self.problem, self.sums = problem, ScoreSums(problem, labels)
        self._ids = {name: number for number, name in enumerate(labels)}
        self._class_weights = np.array(class_weights or [1.0] * len(labels))
        self._weight_C = torch.tensor(class_weights, device=device) if class_weights else None
        self._smoothing = label_smoothing
        # By split: ids of classes, lists of them, or numbers.
        self._labels: WeakKeyDictionary[PreparedSplit, Sequence[Any]] = WeakKeyDictionary()

    @classmethod
    def build(
        cls, config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool
    ) -> SequenceClassification:
        """Load the model with its adapter and a head for the labels, or build it on the meta device.
        Raises ModelError: it cannot be loaded."""
        # The last layer is made for the labels, so workers start once the data are prepared.
        assert isinstance(execution, Resolved)
        assert execution.problem is not None
        labels = execution.label_set
        model = built(config, execution, device=device, seed=seed, on_meta=on_meta, labels=labels)
        return cls(
            model,
            precision=execution.precision,
            attention_name=execution.attention,
            device=device,
            problem=execution.problem,
            labels=execution.labels,
            class_weights=execution.class_weights,
            label_smoothing=config.classification.label_smoothing,
        )

    def collate(self, split: PreparedSplit, rows: Sequence[int]) -> LabelledBatch:
        """Packed rows, without padding, each with its label."""
        labels = self._labels_of(split)
        return collate_labelled([split.row(row) for row in rows], rows, self.targets([labels[row] for row in rows]))

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

    def _labels_of(self, split: PreparedSplit) -> Sequence[Any]:
        if split not in self._labels:
            self._labels[split] = [self.encode(label) for label in split.labels]
        return self._labels[split]

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.float64]:
        """Weight of each row's class, 1 where a row has no one class."""
        if self.problem != "single_label":
            return np.ones(len(split))
        weights: npt.NDArray[np.float64] = self._class_weights[np.array(self._labels_of(split), dtype=np.int64)]
        return weights

    def logits_SC(self, batch: LabelledBatch) -> torch.Tensor:
        """Logits of each row, inside what a strategy wraps."""
        with self.packed.autocast():
            return self.packed.logits_SC(batch)

    def loss_sum(self, batch: LabelledBatch) -> torch.Tensor:
        """The loss summed over rows (fp32 scalar)."""
        return self.compute_loss(self.module(batch), batch)

    def compute_loss(self, logits_SC: torch.Tensor, batch: LabelledBatch) -> torch.Tensor:
        """As :meth:`loss_sum`, from logits; divided by the weight of its rows it is what torch calls ``mean``.

        Cross-entropy with the weights of classes and label smoothing; of a row with several classes the binary
        cross-entropy, meaned over all classes; of a number the squared error.
        """
        logits, labels = logits_SC.float(), batch.labels_S
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

    def score(self, batch: LabelledBatch, sums: torch.Tensor) -> None:
        """Add the loss, the rows' weight, and what the other metrics count."""
        self.add_scores(batch, self.module(batch).float(), sums)

    def add_scores(self, batch: LabelledBatch, logits_SC: torch.Tensor, sums: torch.Tensor) -> None:
        """As :meth:`score`, of logits that are there."""
        sums[0] += self.compute_loss(logits_SC, batch).double()
        weighted = self._weight_C if self.problem == "single_label" else None
        sums[1] += len(batch.rows) if weighted is None else weighted[batch.labels_S].double().sum()
        self.sums.add(sums[2:], batch.rows, logits_SC, batch.labels_S)

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
