"""Floating-point operations per token of a training step, from shapes alone.

A product with a matrix of n weights is 2n operations per token. Forward, input gradients and weight gradients are one
such product each; frozen weights need no gradient of their own. Attention is counted as what causal attention needs:
every token sees half of its row.
"""

from __future__ import annotations

from dataclasses import dataclass

from finray.planning.blueprint import Blueprint


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
    attention = 2.0 * blueprint.query * blueprint.layers * seen
    forward = 2 * (body + head + adapter) + attention
    frozen = blueprint.adapter > 0
    gradients = (2 if frozen else 4) * (body + head) + 4 * adapter + 2 * attention
    again = 2 * (body + adapter) + attention if checkpointing else 0.0
    return Flops(forward + gradients, again)
