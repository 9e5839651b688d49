"""Products of experts, in the dtype of autocast as those of linear layers, and on a CPU in few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from finray import compat

# oneDNN compiles a bf16 product anew for each number of tokens, and each expert gets another one in every pass.
TOKENS_OF = 64


def register() -> None:
    """Have Transformers multiply tokens and experts by :func:`product`, in this process."""
    compat.replace_grouped_mm(product)


def product(
    usual: Callable[..., torch.Tensor], tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Tokens (S, D), sorted by their expert, by the matrices (E, D, H) of their experts, whose tokens end at ``ends``
    (E); by the usual function elsewhere than on a CPU in bf16.

    Without this, experts whose weights are fp32 would be multiplied in fp32.
    """
    device = tokens.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tokens, weight = tokens.to(dtype), weight.to(dtype)
    # Fake tensors have no values.
    if (
        device != "cpu"
        or weight.dtype != torch.bfloat16
        or type(ends) is not torch.Tensor
        or torch.compiler.is_compiling()
    ):
        return usual(tokens, weight, ends)
    product: torch.Tensor = _Products.apply(tokens.to(weight.dtype), weight, tuple(ends.tolist()))  # type: ignore[no-untyped-call]
    return product


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.ends = ends
        return _products(tokens, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        of_tokens = _products(grad, weight.transpose(1, 2), ctx.ends) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, own, span in _spans(ctx.ends, len(tokens)) if of_weight is not None else ():
            given = torch.zeros_like(grad[span])
            given[own.start - span.start : own.stop - span.start] = grad[own]
            torch.mm(tokens[span].t(), given, out=of_weight[expert])  # type: ignore[index]
        return of_tokens, of_weight, None


def _products(tokens: torch.Tensor, weight: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    # Tokens of no expert are at the end.
    out = tokens.new_zeros(len(tokens), weight.shape[2])
    for expert, own, span in _spans(ends, len(tokens)):
        product = tokens[span] @ weight[expert]
        out[own] = product[own.start - span.start : own.stop - span.start]
    return out


def _spans(ends: Sequence[int], count: int) -> Iterator[tuple[int, slice, slice]]:
    """Experts that have tokens, these, and those that are multiplied in their place."""
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            size = min(-(-(end - start) // TOKENS_OF) * TOKENS_OF, count)
            first = min(start, count - size)
            yield expert, slice(start, end), slice(first, first + size)
        start = end
