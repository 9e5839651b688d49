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
from finray.config.extensions import load_named
from finray.data.sampling.collate import collate
from finray.models import attention
from finray.tasks.causal_lm import CausalLM

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


# Score of answers against references, in the same order. A metric is a function and a line in config/extensions.py.
Metric = Callable[[Sequence[str], Sequence[str]], float]


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
            metric: Metric = load_named("finray.metrics", name, where="evaluation.metrics")
            found[name.rpartition(":")[2]] = float(metric(answers, references))
        return cls(found, loss, math.exp(min(loss, 700.0)))

    def json(self) -> dict[str, float]:
        """The scores as they are written."""
        return {**self.metrics, "loss": self.loss, "perplexity": self.perplexity}


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers that are the reference, from 0 to 1."""
    hits = [is_exact(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    return sum(hits) / len(hits) if hits else 0.0


def is_exact(answer: str, reference: str) -> bool:
    """Whether an answer is the reference, white space at the ends aside."""
    return answer.strip() == reference.strip()


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
    sums = torch.zeros(task.metric_count, dtype=torch.float64, device=model.device)
    for number, row in enumerate(rows):
        task.score(collate([row], [number]).to(model.device), sums)
        progress(number + 1)
    if packs:
        inner.set_attn_implementation(usual)
    return task.metrics(sums.tolist())["eval_loss"]
