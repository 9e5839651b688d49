"""Floating-point operations per token, and the FLOP/s that matrix products reach on this machine.

Only necessary operations are counted, each once (no recomputed activations, no attention scores recomputed in the
backward pass). torch counts the matrix products of the plain PEFT model (or the full model) on the meta device, with
full attention; half of attention is counted, because attention is causal. Per token, this is 4N + 6P + 3A for LoRA,
minus the input gradients that the first block's projections do not need, and 6N + 3A for full fine-tuning. N is the
number of weights that a token passes through (for the head, times the share of positions with a target), P that of the
adapters, and A the operations of attention's forward pass.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _model(config: Any, rank: int | None) -> Any:
    """A model on the meta device; `rank` is the rank of LoRA on all linear layers, None trains all weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        model.config.use_cache = False
        if rank is None:
            return model
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def _count(model: Any, tokens: int, targets: int) -> tuple[int, int]:
    """Operations for one row, forward and backward: of linear layers, and of (full) attention."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    # A four-dimensional mask is used as it is; a mask made by Transformers would read values.
    mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=mask, logits_to_keep=torch.arange(targets)).logits.sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention = sum(count for operation, count in by_operation.items() if "bmm" in str(operation))
    return sum(by_operation.values()) - attention, attention


@lru_cache(maxsize=32)
def _coefficients(config: str, kind: str, rank: int | None) -> tuple[float, float, float]:
    """Operations per token, per target, and per squared token of a row."""

    from transformers import AutoConfig

    settings = {name: value for name, value in json.loads(config).items() if name != "model_type"}
    model = _model(AutoConfig.for_model(kind, **settings), rank)
    few, whole = _count(model, 64, 1), _count(model, 64, 33)
    target = (whole[0] - few[0]) / 32
    return (few[0] - target) / 64, target, few[1] / 2 / 64**2


def flops_per_token(config: Any, lengths: Sequence[int], *, share_with_target: float, rank: int | None) -> float:
    """Operations per token, for rows of these lengths.

    Args:
        config: of a Transformers model with eager attention.
        lengths: tokens of the rows.
        share_with_target: share of the positions that have a target.
        rank: rank of LoRA on all linear layers; None for full fine-tuning.
    """
    token, target, square = _coefficients(config.to_json_string(use_diff=False), config.model_type, rank)
    return token + target * share_with_target + square * sum(length**2 for length in lengths) / sum(lengths)


def gemm_rate(config: Any, *, tokens: int, targets: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of only a model's matrix products: the forward pass and the gradients of activations.

    Args:
        config: config of the model with these shapes.
        tokens: rows of the matrix products in the body.
        targets: rows of the matrix products in the head.
        dtype: dtype of all operands.
        device: device to run on.
    """
    layers = dict(_model(config, None).named_modules())
    shapes = Counter(
        (layer.out_features, layer.in_features, name.endswith(("lm_head", "embed_out")))
        for name, layer in layers.items()
        if isinstance(layer, torch.nn.Linear)
    )
    operations = spent = 0.0
    for (outputs, inputs, is_head), count in shapes.items():
        rows = max(1, targets) if is_head else tokens
        weight = torch.randn(outputs, inputs).to(device, dtype)
        below = torch.randn(rows, inputs).to(device, dtype)
        above = torch.randn(rows, outputs).to(device, dtype)
        forward = median(timings(lambda x=below, w=weight: x @ w.T, device))  # type: ignore[misc]
        backward = median(timings(lambda g=above, w=weight: g @ w, device))  # type: ignore[misc]
        operations += 4.0 * rows * outputs * inputs * count
        spent += (forward + backward) * count
    return operations / spent


def timings(action: Callable[[], Any], device: torch.device, *, count: int = 3, least: float = 0.15) -> list[float]:
    """Seconds of each call of an action: at least `count` calls and `least` seconds, after one warm-up call."""
    taken: list[float] = []
    action()
    while len(taken) < count or sum(taken) < least:
        wait(device)
        started = time.perf_counter()
        action()
        wait(device)
        taken.append(time.perf_counter() - started)
    return taken


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
