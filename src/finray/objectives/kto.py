"""KTO: learning from single answers that are desirable or not (Ethayarajh et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from finray.config.objectives import KTO as SPEC
from finray.config.preference import BETA, PreferenceConfig
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch, Row, Values
from finray.objectives.base import MeanObjective


class KTO(MeanObjective):
    """Kahneman-Tversky optimization; see :class:`finray.objectives.base.Objective`.

    The reward of a desirable answer is to be above, that of an undesirable one below a point that is estimated before
    the losses of a step from answers to other prompts, from which nothing is learned. ``max_length``: of a row.
    """

    spec = SPEC

    def __init__(self, settings: PreferenceConfig, max_length: int) -> None:
        self.beta = BETA["kto"] if settings.beta is None else settings.beta
        self.settings, self.max_length = settings, max_length

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:  # noqa: ARG003
        """With the section ``preference``."""
        return cls(config.preference, config.data.max_length)

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.float64]:
        """1 for each answer."""
        return np.ones(len(split))

    def batch_weight(self, batch: Batch) -> float:
        """Answers of the batch."""
        return len(batch.targets_per_row)

    def values(self, split: PreparedSplit, rows: Sequence[int]) -> Values:
        """The reference's log-probabilities, and whether each answer is desirable."""
        return {**super().values(split, rows), "desirable": split.values("label")[list(rows)] > 0}

    def row_before(self, split: PreparedSplit, row: int) -> Row:
        """The prompt with an answer to another one."""
        return split.mismatched(row, most=self.max_length)

    def add_before(self, outputs: torch.Tensor, batch: Batch, sums: torch.Tensor) -> None:
        """The change of the log-probability of these answers since the run began, and their number."""
        sums[0] += (outputs.double() - batch.values["reference"]).sum()
        sums[1] += len(batch.targets_per_row)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """Summed over answers; :meth:`recorded` reads the named sums."""
        logps_K, desirable_S = outputs.double(), batch.values["desirable"]
        logps_S = batch.row_sums(logps_K)
        changes_S = batch.row_sums(logps_K - batch.values["reference"])
        kl = (self.known["kl"] / self.known["answers"]).clamp(min=0)
        ahead_S = torch.where(desirable_S, changes_S - kl, kl - changes_S)
        weights_S = desirable_S * self.settings.desirable_weight + ~desirable_S * self.settings.undesirable_weight
        losses_S = weights_S * torch.sigmoid(-self.beta * ahead_S)
        with torch.no_grad():
            rewards_S = self.beta * changes_S
            named = [desirable_S * rewards_S, ~desirable_S * rewards_S, desirable_S, ahead_S > 0, kl.expand_as(logps_S)]
            named += [desirable_S * logps_S, ~desirable_S * logps_S]
            sums += torch.stack([values_S.double().sum() for values_S in named])
        return losses_S.sum().float()

    def recorded(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        """Means over all answers, or over those of one side, if there are some; ``weight`` is the number of answers."""
        desirable_reward, undesirable_reward, desirable, right, kl, desirable_logp, undesirable_logp = sums
        means = {"accuracy": right / weight, "kl": kl / weight}
        sides = {
            "desirable": (desirable, desirable_reward, desirable_logp),
            "undesirable": (weight - desirable, undesirable_reward, undesirable_logp),
        }
        for side, (count, reward, logp) in sides.items():
            if count:
                means |= {f"{side}_reward": reward / count, f"{side}_logprob": logp / count}
        if 0 < desirable < weight:
            means["margin"] = means["desirable_reward"] - means["undesirable_reward"]
        return {name: means[name] for name in self.spec.means if name in means}
