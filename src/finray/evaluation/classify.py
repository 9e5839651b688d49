"""Predictions of a classifier: labels with probabilities, and scores if the true labels are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from finray import compat
from finray.config.resolved import LabelSet
from finray.data.formats.labels import Label
from finray.data.sampling.collate import LabelledBatch, Row, collate_labelled
from finray.data.sampling.packing import equal_length_batches, plan_packs
from finray.errors import DataError
from finray.models import attention
from finray.models.classifier import label_names, labels_in
from finray.models.saved_layout import without_adapter
from finray.objectives.classification import ClassificationObjective
from finray.objectives.classifier_scores import ClassifierScores
from finray.tasks.sequence_classification import SequenceClassification

# Tokens per forward pass, and rows whose scores are added at a time.
TOKENS, _SCORED = 2048, 256


@dataclass(frozen=True, slots=True)
class Classification:
    """The prediction for one row."""

    label: Label  # a class, several (those above a half), or a number
    probabilities: tuple[float, ...] = ()  # of each class, in the order of their ids; empty for regression


@dataclass(frozen=True, slots=True)
class Classified:
    """Predictions for rows, in order; ``scores`` if their labels are known."""

    labels: LabelSet
    predictions: tuple[Classification, ...]
    scores: ClassifierScores | None


@torch.no_grad()
def classify(
    model: Any,
    rows: Sequence[Row],
    truths: Sequence[Label] | None = None,
    *,
    packs: bool,
    labels: LabelSet | None = None,
    progress: Callable[[int], None] = lambda done: None,
    cached: Mapping[int, Sequence[float]] = MappingProxyType({}),
    save: Callable[[int, list[float]], None] = lambda row, logits: None,
) -> Classified:
    """Classify rows with the forward pass of training; ``eval_loss`` has no class weights and no label smoothing.

    Args:
        model: a classifier in evaluation mode, on its device; a PEFT adapter stays enabled or disabled.
        rows: token ids and token types of each.
        truths: label of each row; None if unknown.
        packs: whether rows may share a forward pass (``finray.models.packing_check``).
        labels: the label set; None reads it from the model's configuration.
        progress: called with the number of rows done so far.
        cached: logits of rows that are known already, by the number of the row.
        save: called with the logits of each row that is computed.

    Raises:
        DataError: a label is not one of the classifier's.
    """
    inner = without_adapter(model)
    label_set = labels or labels_in(inner.config) or LabelSet("single_label", label_names(inner.config))
    usual = compat.attention_implementation(inner)
    if packs:
        attention.register()
        inner.set_attn_implementation(attention.NAME)
    objective = ClassificationObjective(label_set.problem, label_set.names, device=model.device)
    task = SequenceClassification(
        model,
        precision="bf16" if inner.dtype == torch.bfloat16 else "fp32",
        attention_name=attention.NAME if packs else None,
        device=model.device,
        objective=objective,
    )
    encoded = None if truths is None else [_encoded(objective, truth, number) for number, truth in enumerate(truths)]
    sums = torch.zeros(objective.metric_count(len(rows)), dtype=torch.float64, device=model.device)
    row_logits = {row: list(logits) for row, logits in cached.items()}
    left = [row for row in range(len(rows)) if row not in row_logits]
    lengths = [len(rows[row][0]) for row in left]
    plan = (plan_packs if packs else equal_length_batches)(lengths, max([TOKENS, *lengths]))

    def batch_of(some: Sequence[int]) -> LabelledBatch:
        unknown = () if label_set.problem == "multi_label" else 0
        held = objective.targets([unknown if encoded is None else encoded[row] for row in some])
        return collate_labelled([rows[row] for row in some], some, {"labels": held}).to(model.device)

    for number in range(len(plan)):
        some = [left[place] for place in plan.pack(number)]
        for row, line in zip(some, task.logits_SC(batch_of(some)).float().tolist(), strict=True):
            row_logits[row] = line
            save(row, line)
        progress(len(row_logits))
    if encoded is not None:
        for start in range(0, len(rows), _SCORED):
            some = list(range(start, min(start + _SCORED, len(rows))))
            logits_SC = torch.tensor([row_logits[row] for row in some], dtype=torch.float32, device=model.device)
            objective.score(logits_SC, batch_of(some), sums)
    if packs:
        inner.set_attn_implementation(usual)
    predictions = tuple(_prediction(label_set, torch.tensor(row_logits[row]).double()) for row in range(len(rows)))
    return Classified(label_set, predictions, None if encoded is None or not rows else objective.scores(sums.tolist()))


def _encoded(objective: ClassificationObjective, truth: Label, number: int) -> Any:
    try:
        return objective.encode(truth)
    except KeyError as error:
        raise DataError(
            f"the classifier has no label {error.args[0]!r} (its labels: {', '.join(objective.sums.names)})",
            where=f"row {number}",
            repair="use rows with the labels that it was trained on",
        ) from None


def _prediction(labels: LabelSet, logits_C: torch.Tensor) -> Classification:
    if labels.problem == "regression":
        return Classification(float(logits_C[0]))
    if labels.problem == "multi_label":
        chosen = tuple(name for name, logit in zip(labels.names, logits_C.tolist(), strict=True) if logit > 0)
        return Classification(chosen, tuple(logits_C.sigmoid().tolist()))
    return Classification(labels.names[int(np.argmax(logits_C.numpy()))], tuple(logits_C.softmax(-1).tolist()))
