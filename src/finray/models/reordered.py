"""Frozen linear layers on a CPU, with weights in the memory layout of oneDNN's kernels.

torch stores a weight row by row, and converts it to the kernel's layout at every call. For the few rows of a generation
step, that takes about as long as the product itself. Here it is done once, in place: the plain weight is freed, unless
something else uses it too, as the embedding uses a tied head's.
"""

from __future__ import annotations

from typing import Any

import torch

from finray import compat


class ReorderedLinear(torch.nn.Linear):
    """A linear layer for inference; its weight has shape and dtype, but no readable values.

    Args:
        layer: the layer to replace.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = compat.reordered_weight(layer.weight.detach())
        self.weight, self.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x W' + b`` in the dtype of the weight."""
        return linear(x, self.weight, self.bias)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, plus: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W' + b``, plus an optional term added before rounding, for a reordered weight or a plain one."""
    if weight.is_mkldnn:
        return compat.onednn_linear(x.to(weight.dtype), weight, bias, plus)
    assert plus is None
    return torch.nn.functional.linear(x, weight, bias)


def reorder(model: Any) -> int:
    """Reorder the weights of a model for inference; returns the number of layers.

    Weights on a GPU, of another dtype or of special layers are not changed; nothing is if this build of torch lacks
    oneDNN support for them. An adapter's own weights are small, and PEFT layers that are not fused read their base's
    weight directly: these are kept.
    """
    count = 0
    for path, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            is_read = ".lora_" in path or (name == "base_layer" and "forward" not in vars(parent))
            if type(layer) is torch.nn.Linear and not is_read and compat.can_reorder(layer.weight):
                setattr(parent, name, ReorderedLinear(layer))
                count += 1
    return count
