"""What a token costs in floating-point operations, and how many a second this machine's matrix products reach.

Counted are the products that training cannot do without; a multiplication and an addition are two operations:

* LoRA: forward 2N, gradient of the activations 2N, and for the adapters 6P. Not counted is the gradient of frozen
  weights, which nobody works out, nor that of the input of the first block's projections, which nothing needs.
* full fine-tuning: 6N.
* attention: 3A, where A is the forward pass, causal: 2 * layers * heads * head width * sum(s^2) / sum(s) over rows of s
  tokens. The mean of causal scores is half a row's length, and there are two products.

N is the weights of the linear layers that a token meets, without the input embedding, and of the head the share of the
positions that have a target. What is done twice (recomputed activations, scores in the backward pass) counts once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

# Projections whose input is the normalised embedding in the first block.
_FIRST = (".layers.0.", ".h.0.")
_ENTRIES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value")


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of a token and what they are counted from.

    Attributes:
        body: weights of the linear layers but for the head.
        entries: those of them whose input needs no gradient when they are frozen.
        head: weights of the head.
        share_with_logits: share of the positions that have a target.
        adapters: P.
        adapter_entries: weights of adapters whose input needs no gradient.
        attention: A.
        full: whether the weights themselves are trained.
    """

    body: int
    entries: int
    head: int
    share_with_logits: float
    adapters: int
    adapter_entries: int
    attention: float
    full: bool

    @property
    def flops(self) -> float:
        """Counted FLOPs per token."""
        weights = self.body + self.share_with_logits * self.head
        if self.full:
            return 6 * weights + 3 * self.attention
        frozen = 4 * weights - 2 * self.entries
        return frozen + 6 * self.adapters - 2 * self.adapter_entries + 3 * self.attention

    def plain(self) -> dict[str, float]:
        """As JSON types."""
        return {
            "body_weights": self.body,
            "head_weights": self.head,
            "share_with_logits": self.share_with_logits,
            "adapter_parameters": self.adapters,
            "attention_flops_per_token": self.attention,
            "flops_per_token": self.flops,
        }


def count_work(model: Any, lengths: Sequence[int], *, share_with_logits: float) -> Work:
    """The work of a token of rows of these lengths, by the linear layers of a model with or without LoRA.

    Raises:
        ValueError: the model has no linear layers.
    """
    sizes = {
        name: module.in_features * module.out_features
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    adapters = {name: size for name, size in sizes.items() if ".lora_" in name}
    body = {name: size for name, size in sizes.items() if ".lora_" not in name and not _is_head(name)}
    if not body:
        raise ValueError(f"{type(model).__name__} has no linear layers to count")
    config = model.config.get_text_config()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    squares = np.asarray(lengths, dtype=np.float64)
    return Work(
        body=sum(body.values()),
        entries=sum(size for name, size in body.items() if _is_entry(name)),
        head=config.vocab_size * config.hidden_size,
        share_with_logits=share_with_logits,
        adapters=sum(adapters.values()),
        adapter_entries=sum(size for name, size in adapters.items() if ".lora_A." in name and _is_entry(name)),
        attention=2 * config.num_hidden_layers * width * float((squares**2).sum() / squares.sum()),
        full=not adapters,
    )


def _is_head(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("lm_head", "embed_out")


def _is_entry(name: str) -> bool:
    return any(block in f".{name}" for block in _FIRST) and any(f".{entry}" in name for entry in _ENTRIES)


def shapes_of(model: Any) -> Counter[tuple[int, int]]:
    """How often there is a linear layer of (outputs, inputs) in the body of a model."""
    return Counter(
        (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name and not _is_head(name)
    )


def gemm_rate(
    model: Any, *, tokens: int, targets: int, dtype: torch.dtype, device: torch.device, seconds: float = 0.15
) -> float:
    """FLOPs a second of a model's matrix products, forward and of the activations' gradients, and of nothing else.

    Args:
        model: whose shapes are taken.
        tokens: rows of the body's products.
        targets: rows of the head's products.
        dtype: of all operands.
        device: where.
        seconds: least time for each product.
    """
    config = model.config.get_text_config()
    products = [(shape, tokens, count) for shape, count in shapes_of(model).items()]
    products.append(((config.vocab_size, config.hidden_size), max(1, targets), 1))
    operations = spent = 0.0
    for (outputs, inputs), rows, count in products:
        weight = torch.randn(outputs, inputs).to(device, dtype)
        below = torch.randn(rows, inputs).to(device, dtype)
        above = torch.randn(rows, outputs).to(device, dtype)
        forward = _seconds(lambda x=below, w=weight: x @ w.T, device, seconds)  # type: ignore[misc]
        backward = _seconds(lambda g=above, w=weight: g @ w, device, seconds)  # type: ignore[misc]
        operations += 4.0 * rows * outputs * inputs * count
        spent += (forward + backward) * count
    return operations / spent


def _seconds(action: Callable[[], torch.Tensor], device: torch.device, least: float) -> float:
    """The median time of an action that is done for a while, and three times at least."""

    def once() -> float:
        wait(device)
        started = time.perf_counter()
        action()
        wait(device)
        return time.perf_counter() - started

    once()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < least:
        taken.append(once())
    return median(taken)


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
