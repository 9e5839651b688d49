"""Packed rows and rows of one length, for a tiny model of a family with random weights: tokens per CPU second of each.

Both train the same shape, forward and backward pass, in turn in one process, on the same steps of `finray
train`'s own loader: packs of rows of any length, and the passes over rows of one length that it makes of them for a
model which cannot be packed. Of these a micro-batch is the whole step, so that as many rows share a pass as can. Packs
hold rows of nearly one length; so a third takes steps of rows in random order, as with `data.packing: false`.

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

from finray.config.resolved import Precision
from finray.data.sampling.collate import Batch, collate
from finray.data.sampling.order import Order
from finray.data.sampling.packing import one_row_each, plan_packs
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
    drawn: int = 64  # rows of a step without packing
    capacity: int = 1024  # tokens of a pack
    precision: Precision = "bf16"


def task_of(family: str, *, packed: bool, precision: Precision) -> CausalLM:
    """The task of a small model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED | sizes), dtype=torch.float32)
    if packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
    name = attention.NAME if packed else None
    return CausalLM(model.train(), precision=precision, attention_name=name, device=torch.device("cpu"))


def loader_of(job: PackedJob, *, packed: bool, drawn: bool = False) -> StepLoader:
    """The steps of a run over rows of these lengths, whose tokens are random."""
    size = job.drawn if drawn else job.packs
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

    plan = (one_row_each if drawn else plan_packs)(lengths, job.capacity)
    supervised = lengths - np.maximum(lengths // 5, 1)
    split: Any = SimpleNamespace(lengths=lengths, supervised=supervised)
    return StepLoader(
        split,
        plan,
        Order(len(plan), seed=17),
        collate=collated,
        weight=supervised.astype(np.float64),
        global_batch_size=size,
        micro_batch_size=1 if packed else size,
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
    together, apart = (task_of(job.family, packed=packed, precision=job.precision) for packed in (True, False))
    sides = [(together, loader_of(job, packed=True))]
    sides += [(apart, loader_of(job, packed=False, drawn=drawn)) for drawn in (False, True)]
    rounds, counts = [], []
    for at in range(job.warmup + job.rounds):
        steps = [loader.at(at * loader.global_batch_size) for _, loader in sides]
        rates, losses = zip(*(step(task, data) for (task, _), data in zip(sides, steps, strict=True)), strict=True)
        if abs(losses[0] - losses[1]) > 1e-2 * losses[1]:
            raise RuntimeError(f"the losses of one step are {losses[0]} and {losses[1]}")
        rounds.append(rates)
        counts.append([len(steps[1].samples), *(len(data.micro_batches) for data in steps[1:])])
    packed, alike, drawn = zip(*rounds[job.warmup :], strict=True)
    rows, passes, drawn_passes = (median(each) for each in zip(*counts, strict=True))
    return {
        "packed": median(packed),
        "alike": median(alike),
        "ratio": median(one / other for one, other in zip(packed, alike, strict=True)),
        "rows": rows,
        "passes": passes,
        "drawn": median(drawn),
        "drawn_ratio": median(one / other for one, other in zip(packed, drawn, strict=True)),
        "drawn_passes": drawn_passes,
    }


if __name__ == "__main__":
    print(json.dumps(main(PackedJob(**json.loads(sys.argv[1])))))
