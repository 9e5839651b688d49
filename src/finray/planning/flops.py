"""Floating-point operations per token of a training step, from shapes alone.

A product with a matrix of n weights is 2n operations per token. Forward, input gradients and weight gradients are one
such product each; frozen weights need no gradient of their own. Attention is counted as what it needs: every token
sees half of its row, in an encoder all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finray.planning.blueprint import Blueprint

# The share of its data sheet's rate that a GPU reaches in a step, where nothing but arithmetic is in the way.
UTILISATION = 0.4


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations per token.

    Attributes:
        useful: forward and backward.
        again: of activations that are computed a second time.
    """

    useful: float
    again: float

    @property
    def total(self) -> float:
        """Both."""
        return self.useful + self.again


def flops_per_token(blueprint: Blueprint, *, row: int, learned: float, checkpointing: bool) -> Flops:
    """Operations per token.

    Args:
        blueprint: the model with its adapter.
        row: tokens of a row; of rows of different lengths, the mean weighted by tokens (sum of squares over sum).
        learned: share of the positions that have logits.
        checkpointing: whether all activations are computed again.
    """
    body = float(blueprint.linear_weights)
    head = learned * blueprint.head
    adapter = float(blueprint.adapter)
    seen = row if blueprint.window is None else min(row, 2 * blueprint.window)
    attention = (2.0 if blueprint.causal else 4.0) * blueprint.query * blueprint.layers * seen
    forward = 2 * (body + head + adapter) + attention
    frozen = blueprint.adapter > 0
    gradients = (2 if frozen else 4) * (body + head) + 4 * adapter + 2 * attention
    again = 2 * (body + adapter) + attention if checkpointing else 0.0
    return Flops(forward + gradients, again)


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """How long a run takes on GPUs whose rate is known; computed, not measured.

    Attributes:
        tokens_per_s: of all workers.
        seconds: of all steps, where the data is known.
        step_seconds: of a step, likewise.
    """

    tokens_per_s: float
    seconds: float | None = None
    step_seconds: float | None = None


def plan_speed(
    blueprint: Blueprint, lengths: Sequence[int], *, learned: float, checkpointing: bool, tflops: float, workers: int
) -> SpeedPlan:
    """The rate of workers at :data:`UTILISATION`. Small models, short micro-batches and slow networks give less.

    Args:
        blueprint: the model with its adapter.
        lengths: tokens of rows, or of a sample of them.
        learned: share of the tokens that are targets.
        checkpointing: whether all activations are computed again.
        tflops: 10^12 operations a second of a GPU, by its data sheet.
        workers: GPUs.
    """
    row = round(sum(length * length for length in lengths) / max(1, sum(lengths)))
    flops = flops_per_token(blueprint, row=row, learned=learned, checkpointing=checkpointing)
    return SpeedPlan(workers * UTILISATION * tflops * 1e12 / flops.total)


def rounded(value: float) -> int:
    """Two digits: an estimate has no more."""
    digits = max(0, len(str(int(value))) - 2)
    return round(value / float(10**digits)) * int(10**digits)
