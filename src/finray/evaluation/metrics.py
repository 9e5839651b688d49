"""Scores: of answers against references, and the loss of references under a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from finray import compat
from finray.config.scoring import ScoringConfig
from finray.data.sampling.collate import collate
from finray.evaluation.scores.base import Answered, score_named, short_name
from finray.models import attention
from finray.tasks.causal_lm import CausalLM

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model did: metrics by name, a function of your own without its module; loss in nats per target."""

    metrics: Mapping[str, float]
    loss: float
    perplexity: float

    @classmethod
    def of(cls, answers: Sequence[str], references: Sequence[str], *, loss: float, metrics: Sequence[str]) -> Scores:
        """From a model's answers, its mean loss on the references, and the names of the metrics.

        Raises:
            ConfigError: there is no such metric.
        """
        found: dict[str, float] = {}
        for name in metrics:
            rows = [Answered((said,), right) for said, right in zip(answers, references, strict=True)]
            found[short_name(name)] = score_named(name, ScoringConfig()).value(rows)
        return cls(found, loss, math.exp(min(loss, 700.0)))

    def json(self) -> dict[str, float]:
        """The scores as they are written."""
        return {**self.metrics, "loss": self.loss, "perplexity": self.perplexity}


@torch.no_grad()
def mean_loss(
    model: Any, rows: Sequence[Row], *, packs: bool, progress: Callable[[int], None] = lambda done: None
) -> float:
    """Cross-entropy per target (nats) of rows of (ids, mask), by the forward pass that trains.

    Args:
        model: a causal language model in evaluation mode, on its device; a PEFT adapter is left as it is, on or off.
        rows: what is scored, one in each forward pass.
        packs: whether the model can be packed. One that cannot keeps its own attention here too: finray's attention
            for packed rows would silently leave out what it does not know (attention sinks, for one).
        progress: called with the number of rows scored so far.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    usual = compat.attention_implementation(inner)
    if packs:
        attention.register()
        inner.set_attn_implementation(attention.NAME)
    task = CausalLM(
        model,
        precision="bf16" if inner.dtype == torch.bfloat16 else "fp32",
        attention_name=attention.NAME if packs else None,
        device=model.device,
    )
    sums = torch.zeros(task.metric_count(len(rows)), dtype=torch.float64, device=model.device)
    for number, row in enumerate(rows):
        task.score(collate([row], [number]).to(model.device), sums)
        progress(number + 1)
    if packs:
        inner.set_attn_implementation(usual)
    return task.metrics(sums.tolist())["eval_loss"]
