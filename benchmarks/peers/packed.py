"""Packed rows and rows of one length, for a tiny model of a family with random weights: tokens per CPU second of each.

Both train the same shape in bf16, forward and backward pass, in turn in one process: packs of rows of any length, and
the batches that a model which cannot be packed is given. A step is as many of them as hold some thousand tokens, which
are drawn anew for each.

    OMP_NUM_THREADS=1 python packed.py '{"family": "llama", "lengths": [30, 12, ...], "rounds": 5}'
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from finray.data.sampling.collate import Batch, collate
from finray.data.sampling.packing import equal_length_batches, plan_packs
from finray.models import attention
from finray.tasks.causal_lm import CausalLM

WIDTH, WORDS = 128, 2048
SHARED = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "num_hidden_layers": 6}
_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _DELTA | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    "nemotron_h": ("nemotron_h", _MAMBA | {"layer_types": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp"]}),
    "gpt_oss": ("gpt_oss", _TURNS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", _TURNS),
}


@dataclass(frozen=True)
class PackedJob:
    """A family, and the rows."""

    family: str
    lengths: list[int]
    rounds: int = 5
    tokens: int = 8000  # of a step
    capacity: int = 1024  # of a pack


def task_of(family: str, *, packed: bool) -> CausalLM:
    """The task of a small model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED | sizes), dtype=torch.float32)
    if packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
    name = attention.NAME if packed else None
    return CausalLM(model.train(), precision="bf16", attention_name=name, device=torch.device("cpu"))


def drawn(job: PackedJob, plan: Any, seed: int) -> Iterator[Batch]:
    """Batches of a plan in random order, until they hold the tokens of a step."""
    words, left = np.random.default_rng(seed), job.tokens
    for index in random.Random(seed).sample(range(len(plan)), len(plan)):
        lengths = [job.lengths[row] for row in plan.pack(index)]
        # The first fifth of a row is its prompt.
        rows = [
            (words.integers(0, WORDS, n).astype(np.int32), (np.arange(n) >= n // 5).astype(np.uint8)) for n in lengths
        ]
        yield collate(rows, range(len(rows)))
        left -= sum(lengths)
        if left <= 0:
            return


def step(task: CausalLM, batches: list[Batch]) -> float:
    """Forward and backward pass of each; tokens per CPU second."""
    began = time.process_time()
    for batch in batches:
        with task.packed.autocast():
            loss = task.compute_loss(batch)
        loss.backward()
    task.model.zero_grad()
    return sum(sum(batch.lengths) for batch in batches) / (time.process_time() - began)


def main(job: PackedJob) -> dict[str, Any]:
    """Medians, without the first round, and that of the ratios of rounds."""
    sides: list[tuple[CausalLM, Callable[[Any, int], Any]]] = [
        (task_of(job.family, packed=True), plan_packs),
        (task_of(job.family, packed=False), equal_length_batches),
    ]
    plans = [plan(job.lengths, job.capacity) for _, plan in sides]
    rates = [
        [step(task, [*drawn(job, plan, seed)]) for (task, _), plan in zip(sides, plans, strict=True)]
        for seed in range(job.rounds + 1)
    ][1:]
    packed, alike = zip(*rates, strict=True)
    return {
        "packed": median(packed),
        "alike": median(alike),
        "ratio": median(one / other for one, other in rates),
        "rows": median(len(plans[1].pack(index)) for index in range(len(plans[1]))),
    }


if __name__ == "__main__":
    print(json.dumps(main(PackedJob(**json.loads(sys.argv[1])))))
