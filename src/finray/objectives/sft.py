"""Supervised fine-tuning: the cross-entropy of the targets, each token alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from finray.config.objectives import SFT as SPEC
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch
from finray.objectives.base import MeanObjective

# exp() of more than this is not a float; a perplexity so large says nothing anyway.
_LARGEST_EXPONENT = 700.0


class SFT(MeanObjective):
    """See :class:`finray.objectives.base.Objective`."""

    spec = SPEC

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.int64]:
        """Targets of each row."""
        return split.supervised

    def batch_weight(self, batch: Batch) -> float:
        """Targets of the batch."""
        return len(batch.targets_K)

    def loss_sum(self, outputs: torch.Tensor, batch: Any, sums: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The cross-entropy, which the head has summed (fp32 scalar, nats)."""
        return outputs

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss per target, and its exponential."""
        metrics = super().metrics(sums)
        return {**metrics, "perplexity": math.exp(min(metrics["eval_loss"], _LARGEST_EXPONENT))}
