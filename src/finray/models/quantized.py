"""Linear layers whose frozen weights are stored in 4 or 8 bits, quantized by bitsandbytes.

The product is computed with dequantized weights, in the compute dtype, in forward and backward alike. LLM.int8()'s own
product would quantize the inputs too, by columns of the whole batch: training on a row would then depend on its
neighbours in the pack.

We do not use bitsandbytes' own layers: they store the quantization state on the parameter, which FSDP2 replaces, and
change the layout of their weights when a CPU evaluates.

Packed bytes are stored in a tensor of the compute dtype, because FSDP gathers the weights of a block in one dtype.
Scales belong to the module and are not sharded: they take 0.13 bits a weight (4 bits), or one number a row (8 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from finray.errors import ModelError, require_package
from finray.models.towers import text_tower

BITS = {"4bit": 4, "8bit": 8}


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer with a packed weight.

    Args:
        layer: the layer to replace; its weight's values are not read.
        bits: 4 or 8.
        dtype: compute dtype, and dtype of the tensor that holds the packed bytes.

    Attributes:
        scales: quantization state besides the bytes; None until :meth:`pack`.
    """

    def __init__(self, layer: torch.nn.Linear, bits: int, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits, self.dtype = bits, dtype
        # bitsandbytes packs 4-bit weights into a column; sharding is by rows.
        fill = _per_element(bits, dtype)
        shape = (
            (self.in_features * self.out_features // fill, 1)
            if bits == 4
            else (self.out_features, self.in_features // fill)
        )
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.weight = torch.nn.Parameter(empty, requires_grad=False)
        self.bias = layer.bias
        self.scales: Any = None

    @property
    def W_q(self) -> torch.Tensor:
        """PEFT calls :meth:`dequantize` on a layer with this attribute (DoRA needs the whole weight)."""
        return self.weight

    def pack(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Store the scales of a weight, and return its packed bytes."""
        from bitsandbytes import functional

        weight = weight_OI.to(self.dtype).contiguous()
        packed: torch.Tensor
        if self.bits == 4:
            packed, self.scales = functional.quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=self.dtype
            )
            return packed
        rounded, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        self.scales = largest[:, None] / 127
        packed = rounded.view(self.dtype)
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Dequantize packed bytes to the weight (out, in)."""
        from bitsandbytes import functional

        packed = packed.detach()
        if packed.is_meta:
            return packed.new_empty(self.out_features, self.in_features)
        if self.bits == 4:
            weight: torch.Tensor = functional.dequantize_4bit(packed, self.scales)
            return weight
        whole: torch.Tensor = (packed.view(torch.int8).float() * self.scales).to(self.dtype)
        return whole

    def dequantize(self) -> torch.Tensor:
        """The weight (out, in) in the compute dtype."""
        return self.unpack(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x W' + b`` in autocast's dtype, or that of x."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            result: torch.Tensor = _Product.apply(x, self.weight, self.unpack)  # type: ignore[no-untyped-call]
            return result if self.bias is None else result + self.bias.to(result.dtype)

    def extra_repr(self) -> str:
        """Shape and bits."""
        return f"{super().extra_repr()}, bits={self.bits}"


class _Product(torch.autograd.Function):
    """``x W'``; the weight is dequantized again in the backward pass instead of being stored."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, unpack: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.unpack = unpack
        return x @ unpack(packed).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return grad_output @ ctx.unpack(packed).to(grad_output.dtype), None, None


def _per_element(bits: int, dtype: torch.dtype) -> int:
    """Weights in one element of the tensor that holds the packed bytes."""
    return torch.finfo(dtype).bits // bits


def quantize_layers(model: Any, bits: int, *, dtype: torch.dtype, keep: Sequence[str] = ()) -> int:
    """Replace the linear layers of a model on the meta device by quantized ones; returns their number.

    The head, fully trained modules (``keep``, ends of names) with all inside them, and layers of odd shapes are not
    replaced. Raises ModelError: there is no linear layer, or bitsandbytes is not installed.
    """
    require_package("model.quantization", "bitsandbytes", extra="quantization", where="model.quantization")
    fill = _per_element(bits, dtype)
    head, body = model.get_output_embeddings(), {id(module) for module in text_tower(model).modules()}
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and id(module) in body
        and module is not head
        and (module.in_features if bits == 8 else module.weight.numel()) % fill == 0
        # It, or what it is part of, as PEFT compares names.
        and not any(path.endswith(tuple(keep)) for path in accumulate(name.split("."), "{}.{}".format))
    ]
    if not layers:
        raise ModelError(
            "the model has no linear layers to quantize",
            where="model.quantization",
            repair="set model.quantization to none",
        )
    for name, module in layers:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, QuantizedLinear(module, bits, dtype))
    return len(layers)
