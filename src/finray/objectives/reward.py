"""Reward models: a head's one output is how good an answer is, learned from pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.config.objectives import REWARD
from finray.config.preference import PreferenceConfig
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import LabelledBatch, Values
from finray.objectives.base import MeanObjective
from finray.objectives.preferences import pair_weights


class Reward(MeanObjective):
    """The Bradley-Terry model of pairs (Ouyang et al. 2022), with margins (Touvron et al. 2023) and centring
    (Eisenstein et al. 2023); see :class:`finray.objectives.base.Objective`.

    Args:
        settings: of the run.
    """

    spec = REWARD

    def __init__(self, settings: PreferenceConfig) -> None:
        self.settings = settings

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:  # noqa: ARG003
        """With the section ``preference``."""
        return cls(config.preference)

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.float64]:
        """1 for the chosen row of each pair. Raises DataError: a group is no pair."""
        return pair_weights(split)

    def values(self, split: PreparedSplit, rows: Sequence[int]) -> Values:
        """The margin of each row's pair, if the loss has one. Raises DataError: the data have no margins."""
        return {"margin": split.values("margin")[list(rows)]} if self.settings.margins else {}

    def batch_weight(self, batch: LabelledBatch) -> float:
        """Pairs of the batch."""
        return len(batch.rows) / 2

    def loss_sum(self, outputs: torch.Tensor, batch: LabelledBatch, sums: torch.Tensor) -> torch.Tensor:
        """Summed over pairs, from rewards (S, 1), chosen first; the named sums are of rewards, and of pairs in which
        the chosen answer's is larger."""
        rewards_P2 = outputs.double().view(-1, 2)
        ahead_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        least_P = batch.values["margin"][::2] if self.settings.margins else torch.zeros_like(ahead_P)
        losses_P = -F.logsigmoid(ahead_P - least_P) + self.settings.centering * rewards_P2.sum(1) ** 2
        with torch.no_grad():
            sums += torch.stack([values.sum() for values in (ahead_P, (ahead_P > 0).double(), *rewards_P2.T)])
        return losses_P.sum().float()
