"""Sequence classification: the logits of a head for each row, over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finray.config.resolved import Execution, Resolved
from finray.config.schema import Config
from finray.config.tasks import SEQUENCE_CLASSIFICATION
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import LabelledBatch, collate_labelled
from finray.models.packed import PackedModel
from finray.objectives.base import Objective
from finray.tasks.packed_task import PackedTask, built, objective_of


class SequenceClassification(PackedTask):
    """A classifier in training; see :class:`finray.training.task.Task`."""

    spec = SEQUENCE_CLASSIFICATION

    def __init__(
        self,
        model: Any,
        *,
        precision: str,
        attention_name: str | None,
        device: torch.device,
        objective: Objective,
    ) -> None:
        packed = PackedModel(model, precision=precision, attention_name=attention_name, device=device)
        super().__init__(packed, objective, self.logits_SC)

    @classmethod
    def build(
        cls, config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool
    ) -> SequenceClassification:
        """Load the model with its adapter and a head for the labels, or build it on the meta device.
        Raises ModelError: it cannot be loaded."""
        # The last layer is made for the labels, so workers start once the data are prepared.
        assert isinstance(execution, Resolved)
        objective = objective_of(config, execution, device=device)
        model = built(config, execution, device=device, seed=seed, on_meta=on_meta, labels=execution.label_set)
        return cls(
            model,
            precision=execution.precision,
            attention_name=execution.attention,
            device=device,
            objective=objective,
        )

    def collate(self, split: PreparedSplit, rows: Sequence[int]) -> LabelledBatch:
        """Packed rows, without padding, each with its label; of an answer, all tokens are of one text."""
        texts = [split.row(row) for row in rows]
        if self.objective.spec.is_reward:
            texts = [(ids, np.zeros_like(mask)) for ids, mask in texts]
        return collate_labelled(texts, rows, self.objective.values(split, rows))

    def logits_SC(self, batch: LabelledBatch) -> torch.Tensor:
        """Logits of each row, inside what a strategy wraps."""
        with self.packed.autocast():
            return self.packed.logits_SC(batch)
