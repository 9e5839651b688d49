"""Causal attention of short rows on a CPU, by plain matrix products that leave out most of what causality hides.

A row's queries are taken in blocks, each with the keys up to its own end: a row of n blocks then costs (n + 1) / 2n of
its full square of scores. Written as one autograd node for all rows, so that nothing is split, joined and split again
on the way back, and only the weights of attention are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

BLOCK = 128


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Causal attention within each row.

    Args:
        query: (1, H, T, D).
        key: (1, G, T, D) with H a multiple of G.
        value: (1, G, T, D).
        lengths: tokens per row, adding up to T.
        scale: factor of the scores.

    Returns:
        (1, T, H, D).
    """
    result: torch.Tensor = _ShortRows.apply(query, key, value, tuple(lengths), scale)  # type: ignore[no-untyped-call]
    return result


def kept_weights(length: int) -> int:
    """Attention weights of one head that a row keeps for the backward pass."""
    return sum((end - first) * end for _, first, end in _blocks((length,)))


@lru_cache(maxsize=4)
def _future(dtype: torch.dtype) -> torch.Tensor:
    """What is added to a square of scores, so that no query sees a key behind it."""
    return torch.full((BLOCK, BLOCK), float("-inf"), dtype=dtype).triu(1)


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start of the row, start and end of a block of its queries), all counted in the pack."""
    start = 0
    for length in lengths:
        for first in range(start, start + length, BLOCK):
            yield start, first, min(first + BLOCK, start + length)
        start += length


class _ShortRows(torch.autograd.Function):
    """Heads that share keys are one matrix product: a block is (G, H / G * queries, D) there."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        shared = key.shape[1]
        q, k, v = query.reshape(shared, heads // shared, tokens, width), key[0], value[0]
        output = query.new_empty(tokens, shared, heads // shared, width)
        weights = []
        for row, first, end in _blocks(lengths):
            size = end - first
            own = q[:, :, first:end].reshape(shared, -1, width)
            seen = slice(row, end)
            scores = torch.baddbmm(q.new_empty(1, 1, 1), own, k[:, seen].transpose(1, 2), beta=0, alpha=scale)
            square = scores.view(shared, -1, size, end - row)[..., first - row :]
            square += _future(scores.dtype)[:size, :size]
            # torch sums a bf16 softmax in fp32 and rounds once; asking for fp32 would keep two more copies.
            weight = torch.softmax(scores, dim=-1)
            weights.append(weight)
            attended = torch.bmm(weight, v[:, seen]).view(shared, -1, size, width)
            output[first:end] = attended.permute(2, 0, 1, 3)
        ctx.save_for_backward(query, key, value, *weights)
        ctx.lengths, ctx.scale = lengths, scale
        return output.view(1, tokens, heads, width)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        _, heads, tokens, width = query.shape
        shared = key.shape[1]
        q, k, v = query.reshape(shared, heads // shared, tokens, width), key[0], value[0]
        grad = grad_output.reshape(tokens, shared, heads // shared, width)
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (torch.zeros(shared, tokens, width, dtype=q.dtype) for _ in range(2))
        for (row, first, end), weight in zip(_blocks(ctx.lengths), weights, strict=True):
            seen = slice(row, end)
            own = q[:, :, first:end].reshape(shared, -1, width)
            above = grad[first:end].permute(1, 2, 0, 3).reshape(shared, -1, width)
            grad_v[:, seen] += torch.bmm(weight.transpose(1, 2), above)
            back = torch.bmm(above, v[:, seen].transpose(1, 2))
            back = torch._softmax_backward_data(back, weight, -1, weight.dtype)
            back *= ctx.scale
            grad_q[:, :, first:end] = torch.bmm(back, k[:, seen]).view(shared, -1, end - first, width)
            grad_k[:, seen] += torch.bmm(back.transpose(1, 2), own)
        return grad_q.view_as(query), grad_k[None], grad_v[None], None, None
