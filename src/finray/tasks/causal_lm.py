"""Causal language modelling: next-token loss over packed rows, logits only where there is a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.config.tasks import CAUSAL_LM
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch, collate
from finray.models.head import loss_sum
from finray.models.packed import PackedModel, require_router_loss
from finray.tasks.packed_task import PackedTask, built

# exp() of more than this is not a float; a perplexity so large says nothing anyway.
_LARGEST_EXPONENT = 700.0


class CausalLM(PackedTask):
    """A causal language model in training; see :class:`finray.training.task.Task`."""

    spec = CAUSAL_LM

    def __init__(self, model: Any, *, precision: str, attention_name: str | None, device: torch.device) -> None:
        packed = PackedModel(model, precision=precision, attention_name=attention_name, device=device)
        super().__init__(packed, self.compute_loss)
        self.router_loss = 0.0

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool) -> CausalLM:
        """Load the model with its adapter, or build it on the meta device. Raises ModelError: it cannot be loaded."""
        model = built(config, execution, device=device, seed=seed, on_meta=on_meta)
        made = cls(model, precision=execution.precision, attention_name=execution.attention, device=device)
        if config.train.router_loss:
            require_router_loss(model, config.model.name)
            made.router_loss = config.train.router_loss
        return made

    def collate(self, split: PreparedSplit, rows: Sequence[int]) -> Batch:
        """Packed rows, without padding."""
        return collate([split.row(row) for row in rows], rows)

    def weight(self, split: PreparedSplit) -> npt.NDArray[np.int64]:
        """Targets of each row."""
        return split.supervised

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy summed over the batch's K targets (fp32 scalar, nats)."""
        result: torch.Tensor = self.module(batch)
        return result

    def metric_count(self, rows: int) -> int:  # noqa: ARG002
        """The loss summed over targets, and their number."""
        return 2

    def score(self, batch: Batch, sums: torch.Tensor) -> None:
        """Add the loss and the number of targets."""
        sums[0] += self.loss_sum(batch).double()
        sums[1] += len(batch.targets_K)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss per target, and its exponential."""
        loss = sums[0] / sums[1]
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """The loss of :meth:`loss_sum`, inside what a strategy wraps; a task with another loss replaces it."""
        with self.packed.autocast():
            if not self.packed.has_plain_head(batch):
                assert not self.router_loss, "the loss of a router is computed beside a plain head only"
                logits = self.packed.logits_KV(batch, batch.target_positions_K)
                return F.cross_entropy(logits.float(), batch.targets_K, reduction="sum")
            if not (self.router_loss and self.model.training):
                hidden = self.packed.hidden_TH(batch).index_select(0, batch.target_positions_K)
                return loss_sum(self.packed.head(), hidden, batch.targets_K)
            hidden_TH, routed = self.packed.hidden_and_routed(batch)
            loss = loss_sum(self.packed.head(), hidden_TH.index_select(0, batch.target_positions_K), batch.targets_K)
            # A mean over tokens; the whole is divided by the targets of the step.
            return loss + self.router_loss * len(batch.targets_K) * routed
