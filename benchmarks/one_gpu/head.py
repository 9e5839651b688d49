"""Projection and loss with a frozen head, forward and backward, and nothing else of a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from finray.models.head import Head, loss_sum
from harness.flops import wait
from one_gpu.measure import forget

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways() -> dict[str, Loss]:
    """Ways to come to the loss summed over all targets, from hidden states, weight and targets."""
    found: dict[str, Loss] = {
        "finray": lambda hidden, weight, targets: loss_sum(Head(weight), hidden, targets),
        "full logits": lambda hidden, weight, targets: F.cross_entropy(
            (hidden @ weight.T).float(), targets, reduction="sum"
        ),
    }
    fused: Any = getattr(F, "linear_cross_entropy", None)
    if fused is not None:
        found["torch's linear_cross_entropy"] = lambda hidden, weight, targets: fused(
            hidden, weight, targets, reduction="sum"
        )
    return found


def measure_head(device: torch.device, *, tokens: int, vocabulary: int, width: int, repeats: int) -> dict[str, Any]:
    """Milliseconds and peak memory (weight and hidden states included) of each way."""
    torch.manual_seed(1)
    weight = (0.02 * torch.randn(vocabulary, width)).to(device, torch.bfloat16)
    hidden = torch.randn(tokens, width).to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,)).to(device)
    return {name: _measure(way, hidden, weight, targets, device, repeats) for name, way in ways().items()}


def _measure(
    way: Loss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, device: torch.device, repeats: int
) -> dict[str, Any]:
    def once() -> float:
        hidden.grad = None
        wait(device)
        started = time.perf_counter()
        loss = way(hidden, weight, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        wait(device)
        return time.perf_counter() - started

    try:
        forget(device)
        once()
        seconds = [once() for _ in range(repeats)]
    except (torch.OutOfMemoryError, TypeError, NotImplementedError) as error:
        hidden.grad = None
        return {"error": "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]}
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    norm = float(torch.linalg.vector_norm(hidden.grad.float())) if hidden.grad is not None else 0.0
    return {"milliseconds": 1e3 * median(seconds), "peak_memory_bytes": memory, "grad_norm": norm}
