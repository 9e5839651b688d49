"""The FLOPs that benchmarks count, beside a formula and those that torch counts while finray's task runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from finray.config.schema import AdapterConfig
from finray.data.sampling.collate import collate
from finray.models import adapters, attention
from finray.tasks.causal_lm import CausalLM

LENGTHS = (40, 9, 23)
HEADS, KEYS, WIDTH, WIDE, LAYERS, WORDS, RANK = 4, 2, 64, 96, 2, 200, 4
# Of a layer: query, output, key, value, gate, up, down.
SHAPES = [(WIDTH, WIDTH)] * 2 + [(WIDTH, WIDTH * KEYS // HEADS)] * 2 + [(WIDTH, WIDE)] * 3


def llama() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "llama",
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
    )


def attention_flops() -> float:
    """Of a token: two products forward and four backward, each over half of the row on average."""
    return 3 * 2 * LAYERS * WIDTH * sum(length**2 for length in LENGTHS) / sum(LENGTHS)


def test_flops_of_full_fine_tuning_are_six_per_weight_and_attention(benchmark_module: Callable[[str], Any]) -> None:
    weights = LAYERS * sum(into * out for into, out in SHAPES) + 0.25 * WORDS * WIDTH
    counted = benchmark_module("flops").flops_per_token(llama(), LENGTHS, share_with_target=0.25, rank=None)
    # The embedding is trained too, so the first block's input has a gradient.
    assert counted == pytest.approx(6 * weights + attention_flops())


def test_flops_of_lora_leave_out_what_needs_no_gradient(benchmark_module: Callable[[str], Any]) -> None:
    entries = [SHAPES[0], *SHAPES[2:4]]
    weights = LAYERS * sum(into * out for into, out in SHAPES) + 0.25 * WORDS * WIDTH
    adapters_ = LAYERS * sum(RANK * (into + out) for into, out in SHAPES)
    unneeded = sum(2 * into * out + 2 * RANK * into for into, out in entries)
    counted = benchmark_module("flops").flops_per_token(llama(), LENGTHS, share_with_target=0.25, rank=RANK)
    assert counted == pytest.approx(4 * weights + 6 * adapters_ - unneeded + attention_flops())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_flops_of_finrays_task_are_those_that_torch_counts(benchmark_module: Callable[[str], Any], method: str) -> None:
    from transformers import AutoModelForCausalLM

    attention.register()
    model: Any = AutoModelForCausalLM.from_config(llama(), attn_implementation=attention.NAME)
    if method == "lora":
        model.requires_grad_(False)
        # Not fused: torch does not count products that are added in place.
        model = adapters.add_lora(model, AdapterConfig(rank=RANK, target_modules="all-linear"), seed=1)
    task = CausalLM(model, precision="bf16", attention_name=attention.NAME, device=torch.device("cpu"))
    generator = np.random.default_rng(1)
    rows = [
        (generator.integers(0, WORDS, length, dtype=np.int32), (np.arange(length) >= length // 3).astype(np.uint8))
        for length in LENGTHS
    ]
    batch = collate(rows, range(len(rows)))
    task.outputs(batch)  # The first batch also proves the head.
    with FlopCounterMode(display=False) as counter:
        task.outputs(batch).backward()
    counted = benchmark_module("flops").flops_per_token(
        llama(),
        LENGTHS,
        share_with_target=len(batch.targets_K) / batch.tokens,
        rank=RANK if method == "lora" else None,
    )
    # Short rows are attended to in full on a CPU, which is twice what causality needs.
    assert counter.get_total_flops() == pytest.approx(batch.tokens * (counted + attention_flops()))
