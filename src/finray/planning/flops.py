"""Floating-point operations per token of a training step, from shapes alone.

A product with a matrix of n weights is 2n operations per token. Forward, input gradients and weight gradients are one
such product each; frozen weights need no weight gradients. Attention is counted as needed: every token sees half of its
row, in an encoder all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finray.planning.blueprint import Blueprint

# Share of its data sheet's rate that a GPU reaches in a step limited only by arithmetic.
UTILIZATION = 0.4
# Seconds in which the host launches the forward and backward pass of a layer, whatever their size: 6.6 to 10.4 ms on an
# H200, with two hundred kernels each (benchmarks/RESULTS.md, "One GPU").
LAUNCHING = 7e-3


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations per token."""

    useful: float  # forward and backward pass
    again: float  # recomputation of activations

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.useful + self.again


def flops_per_token(blueprint: Blueprint, *, row: int, learned: float, checkpointing: bool) -> Flops:
    """Operations per token.

    Args:
        blueprint: the model with its adapter.
        row: tokens per row; for rows of different lengths, the mean weighted by tokens (sum of squares over sum).
        learned: share of positions that have logits.
        checkpointing: whether all activations are recomputed.
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


def busy_tokens(blueprint: Blueprint, flops: Flops, *, tflops: float) -> float:
    """Tokens of a micro-batch from which its arithmetic takes as long as the host takes to launch it.

    A pass that is made again is launched again, so this is the same with checkpointing.
    """
    return blueprint.layers * LAUNCHING * UTILIZATION * tflops * 1e12 / flops.useful


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """Estimated duration of a run on GPUs with known peak rate; computed, not measured."""

    tokens_per_s: float  # total over all workers
    waiting: float = 1.0  # times the arithmetic that a micro-batch takes, for the host launches its kernels as fast
    seconds: float | None = None  # for all steps, if the data is known
    step_seconds: float | None = None  # per step, likewise


def plan_speed(
    blueprint: Blueprint,
    lengths: Sequence[int],
    *,
    tokens: float,
    learned: float,
    checkpointing: bool,
    tflops: float,
    workers: int,
) -> SpeedPlan:
    """Throughput of the workers: at :data:`UTILIZATION`, or as fast as kernels are launched. Slow networks give less.

    Args:
        blueprint: the model with its adapter.
        lengths: lengths of rows in tokens, or of a sample.
        tokens: of a micro-batch.
        learned: share of the tokens that are targets.
        checkpointing: whether all activations are recomputed.
        tflops: 10^12 operations a second of a GPU, by its data sheet.
        workers: number of GPUs.
    """
    row = round(sum(length * length for length in lengths) / max(1, sum(lengths)))
    flops = flops_per_token(blueprint, row=row, learned=learned, checkpointing=checkpointing)
    waiting = max(1.0, busy_tokens(blueprint, flops, tflops=tflops) / tokens)
    return SpeedPlan(workers * UTILIZATION * tflops * 1e12 / (flops.total * waiting), waiting)


def rounded(value: float) -> int:
    """Two significant digits: an estimate has no more."""
    digits = max(0, len(str(int(value))) - 2)
    return round(value / float(10**digits)) * int(10**digits)
