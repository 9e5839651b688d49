"""RMS norms on a CPU as one autograd node, which keeps the normed values in the dtype of its input and nothing else."""

from __future__ import annotations

import copy
import types
from typing import Any, NamedTuple

import torch


class _Formula(NamedTuple):
    """How a norm takes its weight: plus one or as it is; of values that are rounded before, in whose dtype and its own
    the result is (Llama), or are rounded after it (Gemma)."""

    plus: float
    rounds_first: bool


_FORMULAS = (_Formula(0.0, True), _Formula(0.0, False), _Formula(1.0, False))


def fuse(model: Any) -> int:
    """Give every RMS norm of a model the fused forward pass; returns how many there are.

    They are known by what they compute: a module that has a vector and a small number gives what a formula does.
    """
    count = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or weight.ndim != 1 or not isinstance(epsilon, float) or "forward" in vars(module):
            continue
        if len(module._parameters) > 1 or module._buffers or module._modules or module._forward_pre_hooks:
            continue
        formula = _formula_of(module, epsilon)
        if formula is not None:
            module.finray_norm = (formula, epsilon)
            module.forward = types.MethodType(_forward, module)
            count += 1
    return count


def unfuse(model: Any) -> None:
    """Undo :func:`fuse`: a compiler does better."""
    for module in model.modules():
        if vars(module).pop("finray_norm", None) is not None:
            del module.forward


@torch.no_grad()
def _formula_of(module: torch.nn.Module, epsilon: float) -> _Formula | None:
    """The formula that gives what a module does of random values, which are small enough for the number to count."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        size = epsilon**0.5 * torch.randn(8, 64, generator=generator)
        weight = torch.randn(64, generator=generator)
        probe.__dict__["_parameters"] = {"weight": torch.nn.Parameter(weight)}
        left = list(_FORMULAS)
        for x in (size, size.bfloat16()):
            try:
                theirs = type(module).forward(probe, x)
            except Exception:
                # It takes something else (a gate), or another width.
                return None
            ours = [_RmsNorm.apply(x, weight, *formula, epsilon) for formula in left]  # type: ignore[no-untyped-call]
            left = [
                formula
                for formula, result in zip(left, ours, strict=True)
                if isinstance(theirs, torch.Tensor)
                and (result.dtype, result.shape) == (theirs.dtype, theirs.shape)
                and torch.allclose(result, theirs, rtol=1e-5, atol=1e-6)
            ]
    return left[0] if left else None


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.device.type != "cpu" or args or kwargs:
        usual: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        return usual
    formula, epsilon = self.finray_norm
    normed: torch.Tensor = _RmsNorm.apply(x, self.weight, *formula, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    """``w x / sqrt(mean(x x) + epsilon)``, with sums in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, plus: float, rounds_first: bool, epsilon: float
    ) -> torch.Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean.add_(epsilon).rsqrt_()
        normed = exact * inverse if exact is x else exact.mul_(inverse)
        rounded = normed.to(x.dtype)
        ctx.save_for_backward(rounded, inverse, weight)
        ctx.plus = plus
        if rounds_first:
            return weight * rounded
        # Of fp32 values nothing is left to round, and they are kept.
        by = weight.to(exact.dtype) + plus
        return (normed * by if normed is rounded else normed.mul_(by)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, inverse, weight = ctx.saved_tensors
        normed, grad = rounded.to(inverse.dtype), grad.to(inverse.dtype)
        given = grad * (weight.to(inverse.dtype) + ctx.plus)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed).reshape(-1, normed.shape[-1]).sum(0).to(weight.dtype)
        along = torch.linalg.vecdot(given, normed).unsqueeze_(-1).div_(normed.shape[-1])
        return given.addcmul_(normed, along, value=-1).mul_(inverse).to(rounded.dtype), of_weight, None, None, None
