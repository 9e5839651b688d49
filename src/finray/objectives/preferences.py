"""Objectives that learn from pairs: the first row of a group is the chosen answer, the second the rejected one.

The loss is a mean over pairs, so the unit of ``train.global_batch_size`` is a pair.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.config import objectives as specs
from finray.config.objectives import objective_name
from finray.config.preference import BETA, PreferenceConfig
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch
from finray.errors import DataError
from finray.objectives.base import MeanObjective


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of answers, chosen first."""

    logps_P2: torch.Tensor  # log-probabilities (fp64), summed over targets
    tokens_P2: torch.Tensor  # their targets
    changes_P2: torch.Tensor  # log-probabilities less the reference's (fp64), summed; 0 without a reference


class PairObjective(MeanObjective):
    """What they share; see :class:`finray.objectives.base.Objective`.

    Args:
        settings: of the run.
        beta: decided.
    """

    def __init__(self, settings: PreferenceConfig, beta: float) -> None:
        self.settings, self.beta = settings, beta

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:  # noqa: ARG003
        """With the section ``preference``."""
        settings = config.preference
        return cls(settings, BETA.get(objective_name(config), BETA["dpo"]) if settings.beta is None else settings.beta)

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.float64]:
        """1 for the chosen row of each pair. Raises DataError: a group is no pair."""
        return pair_weights(split)

    def batch_weight(self, batch: Batch) -> float:
        """Pairs of the batch."""
        return len(batch.targets_per_row) / 2

    def loss_sum(self, outputs: torch.Tensor, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """Summed over pairs; the named sums are of rewards (how far each answer is preferred), of pairs in which the
        chosen answer's is larger, and of log-probabilities."""
        tokens_P2 = torch.tensor(batch.targets_per_row, device=outputs.device).view(-1, 2)
        # In fp64: a long answer's log-probability has few digits left for the difference to another.
        logps_K = outputs.double()
        changes_K = logps_K - batch.values["reference"] if self.spec.columns else torch.zeros_like(logps_K)
        logps_P2, changes_P2 = (batch.row_sums(values).view(-1, 2) for values in (logps_K, changes_K))
        losses_P, rewards_P2 = self.losses(Pairs(logps_P2, tokens_P2, changes_P2))
        with torch.no_grad():
            margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
            named = [margin_P, (margin_P > 0).double(), *rewards_P2.T, *logps_P2.T]
            sums += torch.stack([values.sum() for values in named])
        return losses_P.sum().float()

    @abstractmethod
    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (P) and rewards (P, 2) of pairs."""


def pair_weights(split: PreparedSplit) -> npt.NDArray[np.float64]:
    """1 for the chosen row of each pair, 0 for the rejected one. Raises DataError: a group is no pair."""
    sizes, starts = np.diff(split.groups.starts), split.groups.starts[:-1]
    if (sizes != 2).any():
        raise DataError(
            "a row with another answer or none beside it is no pair",
            where=split.where(int(starts[(sizes != 2).argmax()])),
            repair="give every row a chosen and a rejected answer",
        )
    weights = np.zeros(len(split))
    weights[starts] = 1.0
    return weights


class DPO(PairObjective):
    """Direct preference optimization (Rafailov et al. 2023), IPO (Azar et al. 2023), SLiC's hinge (Zhao et al. 2023)
    and robust DPO (Chowdhury et al. 2024)."""

    spec = specs.DPO

    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """From the change of each token's log-probability since the reference."""
        settings, beta = self.settings, self.beta
        is_mean = settings.length_normalized or settings.loss == "ipo"
        changes_P2 = pairs.changes_P2 / pairs.tokens_P2 if is_mean else pairs.changes_P2
        ahead_P = changes_P2[:, 0] - changes_P2[:, 1]
        if settings.loss == "ipo":
            losses_P = (ahead_P - 1 / (2 * beta)) ** 2
        elif settings.loss == "hinge":
            losses_P = F.relu(1 - beta * ahead_P)
        else:
            losses_P = _smoothed(beta * ahead_P, settings.label_smoothing, unbiased=settings.loss == "robust")
        own_P = -pairs.logps_P2[:, 0] / pairs.tokens_P2[:, 0]
        return losses_P + settings.chosen_weight * own_P, beta * changes_P2


class ORPO(PairObjective):
    """Odds ratio preference optimization (Hong et al. 2024): the chosen answer's own loss, and how much more likely it
    is than the rejected one, per token."""

    spec = specs.ORPO

    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Without a reference."""
        means_P2 = pairs.logps_P2 / pairs.tokens_P2
        # log(1 - p); a probability of 1 has no odds.
        log_odds_P2 = means_P2 - torch.log(-torch.expm1(means_P2.clamp(max=-1e-12)))
        ratio_P = F.logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])
        return -means_P2[:, 0] - self.beta * ratio_P, self.beta * means_P2


class SimPO(PairObjective):
    """Simple preference optimization (Meng et al. 2024): log-probabilities per token, and a margin."""

    spec = specs.SIMPO

    def losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Without a reference."""
        settings, means_P2 = self.settings, pairs.logps_P2 / pairs.tokens_P2
        ahead_P = self.beta * (means_P2[:, 0] - means_P2[:, 1]) - settings.gamma
        losses_P = _smoothed(ahead_P, settings.label_smoothing, unbiased=False)
        return losses_P - settings.chosen_weight * means_P2[:, 0], self.beta * means_P2


def _smoothed(ahead_P: torch.Tensor, smoothing: float, *, unbiased: bool) -> torch.Tensor:
    """The logistic loss where a share of the pairs is swapped; ``unbiased``: its expectation is that without."""
    right_P, swapped_P = -F.logsigmoid(ahead_P), -F.logsigmoid(-ahead_P)
    if unbiased:
        return ((1 - smoothing) * right_P - smoothing * swapped_P) / (1 - 2 * smoothing)
    return (1 - smoothing) * right_P + smoothing * swapped_P
