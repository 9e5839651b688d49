"""Products of experts, in the dtype of autocast as those of linear layers, and on a CPU in few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from finray import compat

# oneDNN compiles a bf16 product anew for each number of tokens, and each expert gets another one in every pass.
TOKENS_OF = 64


def register() -> None:
    """Have Transformers multiply tokens and experts by :func:`product`, and those with a bias by :func:`with_bias`, in
    this process."""
    compat.replace_grouped_mm(product)
    compat.replace_experts(with_bias)


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
    product: torch.Tensor = _Products.apply(tokens.to(weight.dtype), weight, None, tuple(ends.tolist()))  # type: ignore[no-untyped-call]
    return product


def with_bias(
    usual: Callable[..., torch.Tensor],
    module: Any,
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The output (T, D) of a layer's experts, of which each token has K, summed by their weights (T, K); by the usual
    function elsewhere than on a CPU under autocast to bf16, and for experts without a bias.

    That gathers a row of the bias for each token in fp32, and adds up their gradients: a tenth of a pass of gpt-oss.
    """
    if (
        not compat.has_gate_and_bias(module)
        or type(hidden_TD) is not torch.Tensor
        or hidden_TD.device.type != "cpu"
        or not torch.is_autocast_enabled("cpu")
        or torch.get_autocast_dtype("cpu") != torch.bfloat16
        or torch.compiler.is_compiling()
    ):
        return usual(module, hidden_TD, experts_TK, weights_TK)
    of_pairs, order = torch.sort(experts_TK.reshape(-1))
    ends = tuple(torch.bincount(of_pairs, minlength=module.num_experts).cumsum(0).tolist())

    def times(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inputs, weight, bias = (each.to(torch.bfloat16) for each in (inputs, weight, bias))
        weight = weight if module.is_transposed else weight.transpose(1, 2)
        product: torch.Tensor = _Products.apply(inputs, weight, bias, ends)  # type: ignore[no-untyped-call]
        return product

    inner = times(hidden_TD[order // experts_TK.shape[1]], module.gate_up_proj, module.gate_up_proj_bias)
    outer = times(module._apply_gate(inner), module.down_proj, module.down_proj_bias)
    weighted = outer * weights_TK.reshape(-1)[order, None]
    return weighted[torch.argsort(order)].view(*experts_TK.shape, -1).sum(1).to(hidden_TD.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.ends = ends
        return _products(tokens, weight, ends, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        of_tokens = _products(grad, weight.transpose(1, 2), ctx.ends) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, own, span in _spans(ctx.ends, len(tokens)) if of_weight is not None else ():
            given = torch.zeros_like(grad[span])
            given[own.start - span.start : own.stop - span.start] = grad[own]
            torch.mm(tokens[span].t(), given, out=of_weight[expert])  # type: ignore[index]
        of_bias = grad.new_zeros(len(weight), grad.shape[1]) if ctx.needs_input_grad[2] else None
        for expert, own, _ in _spans(ctx.ends, len(tokens)) if of_bias is not None else ():
            torch.sum(grad[own], 0, out=of_bias[expert])  # type: ignore[index]
        return of_tokens, of_weight, of_bias, None


def _products(
    tokens: torch.Tensor, weight: torch.Tensor, ends: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    # Tokens of no expert are at the end.
    out = tokens.new_zeros(len(tokens), weight.shape[2])
    for expert, own, span in _spans(ends, len(tokens)):
        product = (
            tokens[span] @ weight[expert] if bias is None else torch.addmm(bias[expert], tokens[span], weight[expert])
        )
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
