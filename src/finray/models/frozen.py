"""Frozen linear layers with a bias on a CPU in bf16: one product adds the bias.

torch writes the bias into every row of the result first, and its product reads that again: some 4 % of a small model's
step.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional as F

from finray import compat


def fuse_biases(model: Any) -> int:
    """Give every frozen linear layer with a bias a forward that adds it in the product; returns how many there are."""
    count = 0
    for module in model.modules():
        is_plain = type(module) is torch.nn.Linear and "forward" not in vars(module)
        if (
            is_plain
            and module.bias is not None
            and not any(parameter.requires_grad for parameter in module.parameters())
        ):
            module.forward = types.MethodType(_forward, module)
            count += 1
    return count


def is_one_pass(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`finray.compat.onednn_linear` takes these as they are."""
    # Fake tensors and the compiler know torch's operators only.
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    return x.dtype == weight.dtype == torch.bfloat16 and compat.can_reorder(weight)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.ndim < 2 or not is_one_pass(x, self.weight) or self.bias.dtype != x.dtype:
        return F.linear(x, self.weight, self.bias)
    # Flattened here for one matrix product in the backward pass.
    result: torch.Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """``y = x W' + b`` for a matrix x, with frozen W and b."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return compat.onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, None
