"""Packed rows and rows of one length, for a tiny model of a family with random weights: tokens per CPU second of each.

Both train the same shape in bf16, forward and backward pass, in turn in one process, on the same steps of `finray
train`'s own loader: packs of rows of any length, and the passes over rows of one length that it makes of them for a
model which cannot be packed. Of these a micro-batch is the whole step, so that as many rows share a pass as can.

    OMP_NUM_THREADS=1 python packed.py '{"family": "llama", "lengths": [30, 12, ...], "rounds": 5}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from finray.data.sampling.collate import Batch, collate
from finray.data.sampling.order import Order
from finray.data.sampling.packing import plan_packs
from finray.models import attention
from finray.tasks.causal_lm import CausalLM
from finray.training.loader import StepData, StepLoader

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
    warmup: int = 4  # first rounds, in which the heap grows
    packs: int = 8  # of a step: what `train.global_batch_size: auto` takes
    capacity: int = 1024  # tokens of a pack


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


def loader_of(job: PackedJob, *, packed: bool) -> StepLoader:
    """The steps of a run over rows of these lengths, whose tokens are random."""
    lengths = np.array(job.lengths)

    def collated(rows: Sequence[int]) -> Batch:
        # The first fifth of a row is its prompt.
        drawn = [
            (
                np.random.default_rng(row).integers(0, WORDS, n).astype(np.int32),
                (np.arange(n) >= n // 5).astype(np.uint8),
            )
            for row, n in ((row, job.lengths[row]) for row in rows)
        ]
        return collate(drawn, rows)

    plan, supervised = plan_packs(lengths, job.capacity), lengths - np.maximum(lengths // 5, 1)
    split: Any = SimpleNamespace(lengths=lengths, supervised=supervised)
    return StepLoader(
        split,
        plan,
        Order(len(plan), seed=17),
        collate=collated,
        weight=supervised.astype(np.float64),
        global_batch_size=job.packs,
        micro_batch_size=1 if packed else job.packs,
        rows_apart=not packed,
        rank=0,
        world_size=1,
    )


def step(task: CausalLM, data: StepData) -> tuple[float, float]:
    """Forward and backward pass of each micro-batch; tokens per CPU second, and the loss."""
    began, total = time.process_time(), 0.0
    for _, batch in data.micro_batches:
        with task.packed.autocast():
            loss = task.compute_loss(batch)  # type: ignore[arg-type]
        loss.backward()
        total += loss.item()
    task.model.zero_grad()
    return data.tokens / (time.process_time() - began), total / data.weight


def main(job: PackedJob) -> dict[str, Any]:
    """Medians, without the first rounds, and that of the ratios of rounds. Raises RuntimeError: the losses differ."""
    sides = [(task_of(job.family, packed=packed), loader_of(job, packed=packed)) for packed in (True, False)]
    steps = [[loader.at(at * job.packs) for _, loader in sides] for at in range(job.warmup + job.rounds)]
    rounds = [[step(task, data) for (task, _), data in zip(sides, pair, strict=True)] for pair in steps]
    for (_, loss), (_, other) in rounds:
        if abs(loss - other) > 1e-2 * other:
            raise RuntimeError(f"the losses of one step are {loss} and {other}")
    packed, alike = zip(*([rate for rate, _ in pair] for pair in rounds[job.warmup :]), strict=True)
    return {
        "packed": median(packed),
        "alike": median(alike),
        "ratio": median(one / other for one, other in zip(packed, alike, strict=True)),
        "rows": median(len(data.samples) for data, _ in steps),
        "passes": median(len(data.micro_batches) for _, data in steps),
    }


if __name__ == "__main__":
    print(json.dumps(main(PackedJob(**json.loads(sys.argv[1])))))
