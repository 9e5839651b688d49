"""The FLOPs that benchmarks count, beside those that torch counts while a model runs."""

from __future__ import annotations

from pathlib import Path
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
HEADS, WIDTH, LAYERS = 4, 16, 2


@pytest.fixture
def flops(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from harness import flops

    return flops


def build(method: str) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=200,
        hidden_size=HEADS * WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    if method == "lora":
        model.requires_grad_(False)
        # Not fused: torch does not count products that are added in place.
        model = adapters.add_lora(model, AdapterConfig(rank=4, target_modules="all-linear"), seed=1)
    return CausalLM(model, precision="bf16", attention_name=attention.NAME, device=torch.device("cpu"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_counted_flops_are_those_that_torch_counts(flops: Any, method: str) -> None:
    generator = np.random.default_rng(1)
    rows = [
        (generator.integers(0, 200, length, dtype=np.int32), np.arange(length) >= length // 3) for length in LENGTHS
    ]
    batch = collate([(ids, mask.astype(np.uint8)) for ids, mask in rows], range(len(rows)))
    task = build(method)
    task.loss_sum(batch)  # The first batch also proves the head.
    with FlopCounterMode(display=False) as counter:
        task.loss_sum(batch).backward()
    work = flops.count_work(task.model, LENGTHS, share_with_logits=len(batch.targets_K) / batch.tokens)
    causal = 3 * work.attention * batch.tokens
    # Short rows are attended to in full on a CPU, which is twice what causality needs.
    done = work.flops * batch.tokens + causal
    assert causal == 3 * 2 * LAYERS * HEADS * WIDTH * sum(length**2 for length in LENGTHS)
    assert counter.get_total_flops() == done
