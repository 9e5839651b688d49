"""LoRA's linear layer as one autograd node: the same arithmetic as PEFT's, with fewer passes over memory.

PEFT computes ``base(x) + B(A(x)) * s`` as separate operations: the input is cast for the adapter and stored a second
time for the backward pass, and the sum and the scaling are separate passes over the output. Here the matrix
multiplication accumulates the base's product into the adapter's, and the input is stored once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from finray import compat
from finray.models.frozen import is_one_pass
from finray.models.quantized import QuantizedLinear
from finray.models.reordered import linear
from finray.models.saved_layout import NAME, PISSA_RESIDUAL, REFERENCE

# Marks layers whose output must not be modified in place.
_NO_INPLACE = "_finray_no_inplace"


def fuse(model: Any) -> int:
    """Give every plain LoRA layer of a PEFT model the fused forward; returns how many there were.

    Layers other than ``W x + s B A x`` (DoRA and other variants, transposed weights, several adapters) keep PEFT's. W
    may be quantized (:mod:`finray.models.quantized`), and a PiSSA adapter and its initial value become one product.
    """
    from peft.tuners.lora.layer import Linear, ParamWrapper

    count = 0
    for module in model.modules():
        # PEFT's adapter of a parameter adds up the whole weight, where that is of a linear layer too.
        is_weight = type(module) is ParamWrapper and module.parameter_name == "weight"
        if type(module) is not Linear and not is_weight:
            continue
        names, dropout = [name for name in module.lora_A if name != REFERENCE], module.lora_dropout[NAME]
        if (
            type(module.base_layer) in (torch.nn.Linear, QuantizedLinear)
            # With dropout, the two adapters of PiSSA read different inputs.
            and (names == [NAME] or (names == [NAME, PISSA_RESIDUAL] and not getattr(dropout, "p", 0.0)))
            and not module.lora_variant
            and module.lora_A[NAME].bias is None
            and module.lora_B[NAME].bias is None
        ):
            module.forward = types.MethodType(_forward, module)
            count += 1
    return count


def disable_inplace(module: torch.nn.Module) -> None:
    """Disable in-place operations in a module: selective checkpointing cannot store a tensor that changes."""
    for part in module.modules():
        if hasattr(part, "lora_A"):
            setattr(part, _NO_INPLACE, True)


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if self.disable_adapters or self.merged or args or kwargs:
        output: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        return output
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    dropout = self.lora_dropout[NAME]
    dropped = dropout(x) if isinstance(dropout, torch.nn.Dropout) and self.training else None
    base, name = self.base_layer, REFERENCE if self.active_adapters == [REFERENCE] else NAME
    down, up = self.lora_A[name].weight, self.lora_B[name].weight
    if PISSA_RESIDUAL in self.lora_A:
        down = torch.cat([down, self.lora_A[PISSA_RESIDUAL].weight])
        up = torch.cat([up, self.lora_B[PISSA_RESIDUAL].weight], dim=1)
    with torch.autocast(device, enabled=False):
        if base.weight.is_mkldnn:
            # Only in inference: the same sum, rounded once.
            low = (x if dropped is None else dropped) @ down.to(x.dtype).T
            return linear(x, base.weight, base.bias, plus=low * self.scaling[name] @ up.to(x.dtype).T)
        # Flattened here, because torch 2.11 cannot compile an autograd function that reads the shapes of its inputs.
        result: torch.Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2),
            None if dropped is None else dropped.flatten(0, -2),
            base.weight,
            base.bias,
            down,
            up,
            self.scaling[name],
            base.unpack if isinstance(base, QuantizedLinear) else None,
            getattr(self, _NO_INPLACE, False),
        )
    return result.view(*x.shape[:-1], result.shape[-1])


def _scales_in_products(tensor: torch.Tensor) -> bool:
    """Whether a product takes LoRA's factor with it, without a kernel of its own: on a GPU, where launches take time.
    On a CPU it would change the rounding of runs that have begun."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


class _LoraLinear(torch.autograd.Function):
    """``y = x W' + b + s (d A') B'`` for a frozen W, where d is x after dropout; x and d are matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scaling: float,
        unpack: Callable[[torch.Tensor], torch.Tensor] | None = None,
        apart: bool = False,
    ) -> torch.Tensor:
        packed = weight
        if unpack is not None:
            weight = unpack(packed)
        weight, down, up = (tensor.to(x.dtype) for tensor in (weight, lora_a, lora_b))
        inner = x if dropped is None else dropped
        low = inner @ down.T
        bias = None if bias is None else bias.to(x.dtype)
        if bias is not None and not apart and is_one_pass(x, weight):
            output = compat.onednn_linear(x, weight, bias, (low * scaling) @ up.T)
        elif torch.compiler.is_compiling():
            # A compiler fuses it by itself, and that of torch 2.11 loses gradients where a result is changed in place.
            output = torch.nn.functional.linear(x, weight, bias) + (low * scaling) @ up.T
        else:
            # The small product first: then selective checkpointing stores the sum, and not only the base's part.
            output = x.new_empty(x.shape[0], weight.shape[0])
            if _scales_in_products(x):
                output.addmm_(low, up.T, beta=0, alpha=scaling)
            else:
                torch.mm(low * scaling, up.T, out=output)
            if bias is not None:
                output += bias
            output = torch.addmm(output, x, weight.T) if apart else output.addmm_(x, weight.T)
        # A packed weight is unpacked again in the backward pass.
        ctx.save_for_backward(inner, low, weight if unpack is None else packed, down, up)
        ctx.scaling, ctx.unpack = scaling, unpack
        ctx.has_dropout = dropped is not None
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inner, low, weight, down, up = ctx.saved_tensors
        if ctx.unpack is not None:
            weight = ctx.unpack(weight).to(grad.dtype)
        if _scales_in_products(grad):
            grad_low = grad.new_empty(low.shape).addmm_(grad, up, beta=0, alpha=ctx.scaling)
            grad_b = grad.new_empty(up.shape).addmm_(grad.T, low, beta=0, alpha=ctx.scaling).float()
        else:
            grad_low = (grad @ up) * ctx.scaling
            # Turned round: oneDNN is 1.5x slower at the product with the wide matrix transposed.
            grad_b = (low.T @ grad).float().mul_(ctx.scaling).T.contiguous()
        grad_a = (grad_low.T @ inner).float()
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if not ctx.has_dropout:
                grad_x.addmm_(grad_low, down)
        if ctx.has_dropout and ctx.needs_input_grad[1]:
            grad_dropped = grad_low @ down
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None, None, None
