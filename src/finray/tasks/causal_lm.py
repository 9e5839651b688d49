"""Causal language modelling: next-token loss over packed rows, logits only where there is a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.config.tasks import CAUSAL_LM
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Batch, collate, collate_branches
from finray.errors import ConfigError
from finray.models.head import loss_sum
from finray.models.packed import PackedModel, require_router_loss
from finray.objectives.sft import SFT
from finray.tasks.packed_task import PackedTask, built, objective_of


class CausalLM(PackedTask):
    """A causal language model in training; see :class:`finray.training.task.Task`."""

    spec = CAUSAL_LM

    def __init__(self, model: Any, *, precision: str, attention_name: str | None, device: torch.device) -> None:
        packed = PackedModel(model, precision=precision, attention_name=attention_name, device=device)
        super().__init__(packed, SFT(), self.forward)
        self.router_loss = 0.0

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool) -> CausalLM:
        """Load the model with its adapter, or build it on the meta device. Raises ModelError: it cannot be loaded;
        ConfigError: its objective does not go with it."""
        objective = objective_of(config, execution, device=device)
        if config.train.router_loss and objective.spec.reads != "cross_entropy":
            raise ConfigError(
                f"the loss of a router is not added to that of `{objective.spec.name}`",
                where="train.router_loss",
                repair="set it to 0",
            )
        model = built(config, execution, device=device, seed=seed, on_meta=on_meta)
        made = cls(model, precision=execution.precision, attention_name=execution.attention, device=device)
        made.objective = objective
        made.packed.shares_prompts &= not config.train.compile
        if config.train.router_loss:
            require_router_loss(model, config.model.name)
            made.router_loss = config.train.router_loss
        return made

    def collate(self, split: PreparedSplit, rows: Sequence[int], *, before: bool = False) -> Batch:
        """Packed rows, without padding; rows of a group with their common prompt once, if the model can."""
        if before:
            read = [self.objective.row_before(split, row) for row in rows]
            return collate(read, rows, self.objective.values_before(split, rows))
        tokens, values = [split.row(row) for row in rows], self.objective.values(split, rows)
        if self.objective.spec.in_groups and self.packed.shares_prompts:
            return collate_branches(tokens, rows, values, split.group_sizes(rows))
        return collate(tokens, rows, values)

    def forward(self, batch: Batch) -> torch.Tensor:
        """What the objective reads, inside what a strategy wraps: the cross-entropy summed over the batch's K targets
        (fp32 scalar, nats), or their log-probabilities (fp32, K)."""
        if self.objective.spec.reads == "log_probabilities":
            with self.packed.autocast():
                return self.packed.log_probabilities_K(batch)
        return self.compute_loss(batch)

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """The summed cross-entropy; a task with another loss replaces it."""
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
