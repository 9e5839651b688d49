"""Dropout on a CPU, where torch draws one number after the other, which takes a sixth of a classifier's step.

Here a mask is drawn as 16-bit numbers, four from each draw of NumPy's SFC64, whose seed comes from torch's generator:
so a mask depends on ``torch.manual_seed`` alone, and a recomputed forward pass draws the same one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

_VALUES = 2**16


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
    """``torch.nn.functional.dropout`` in training, except that on a CPU p is rounded to a multiple of 2 ** -16.

    Args:
        x: of any shape, of a floating-point dtype.
        p: probability of dropping an element; the others are divided by the probability of keeping one.
    """
    dropped = round(p * _VALUES)
    # Fake tensors and the compiler know torch's operators only.
    if type(x) is not torch.Tensor or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    if not 0 < dropped < _VALUES:
        return F.dropout(x, float(dropped > 0))
    result: torch.Tensor = _Dropout.apply(x, dropped)  # type: ignore[no-untyped-call]
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropped: int) -> torch.Tensor:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        bits = np.random.SFC64(seed).random_raw(-(-x.numel() // 4)).view(np.int16)[: x.numel()]
        # In place: 1 where an element is kept.
        kept = torch.from_numpy(bits).view(x.shape).ge_(dropped - _VALUES // 2)
        ctx.save_for_backward(kept)
        ctx.scale = _VALUES / (_VALUES - dropped)
        # Not `x * kept`, which would make a second tensor of the dtype of x.
        return kept.to(x.dtype).mul_(x).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return kept.to(grad.dtype).mul_(grad).mul_(ctx.scale), None
