"""An objective with a column, as somebody outside of finray would write it."""

from __future__ import annotations

from typing import Any

import torch

from finray.config.objectives import ObjectiveSpec
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch
from finray.objectives.base import MeanObjective


class Leashed(MeanObjective):
    """The cross-entropy, and the squared change of each token's log-probability since the run began."""

    spec = ObjectiveSpec("leashed", reads="log_probabilities", means=("drift",), columns=("reference",))

    def weight(self, split: PreparedSplit) -> Any:
        return split.supervised

    def batch_weight(self, batch: Batch) -> float:
        return len(batch.targets_K)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        change = outputs - batch.values["reference"]
        sums[0] += change.detach().abs().sum().double()
        return (0.3 * change.square() - outputs).sum()


class Loose(Leashed):
    """Without its leash it is `sft`."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        super().loss_sum(outputs, batch, sums)
        return -outputs.sum()
