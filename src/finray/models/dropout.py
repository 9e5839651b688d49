"""Dropout on a CPU, where torch draws one number after the other, which takes a sixth of a classifier's step.

Here a mask is drawn as bytes, eight from each draw of NumPy's SFC64, whose seed comes from torch's generator: so a mask
depends on ``torch.manual_seed`` alone, and a recomputed forward pass draws the same one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

_VALUES = 2**8


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` by :func:`drop`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop elements while training."""
        return drop(input, self.p) if self.training else input


def apply(model: torch.nn.Module) -> None:
    """Make every ``torch.nn.Dropout`` of a model a :class:`Dropout`."""
    for module in model.modules():
        if type(module) is torch.nn.Dropout and not module.inplace:
            module.__class__ = Dropout


def drop(x: torch.Tensor, p: float) -> torch.Tensor:
    """``torch.nn.functional.dropout`` in training, except that on a CPU each mask rounds p to a multiple of 1/256.

    It is rounded up or down at random, so that it is p on average.

    Args:
        x: of any shape, of a floating-point dtype.
        p: probability of dropping an element; the others are divided by the mask's probability of keeping one.
    """
    # Fake tensors and the compiler know torch's operators only.
    if type(x) is not torch.Tensor or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    if not 0 < p <= 1 - 1 / _VALUES:
        return F.dropout(x, p)
    result: torch.Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        # The last draw rounds p.
        raw = np.random.SFC64(seed).random_raw(-(-x.numel() // 8) + 1)
        dropped = int(p * _VALUES + int(raw[-1] >> 32) / 2**32)
        # In place: 1 where an element is kept.
        kept = torch.from_numpy(raw.view(np.uint8)[: x.numel()]).view(x.shape).ge_(dropped)
        ctx.save_for_backward(kept)
        ctx.scale = _VALUES / (_VALUES - dropped)
        return _scaled(x, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _scaled(grad, kept, ctx.scale), None


def _scaled(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """``x * kept * scale`` in one pass."""
    return torch.addcmul(x.new_zeros(()), x, kept.to(x.dtype), value=scale)
