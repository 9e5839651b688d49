"""A peer of the CPU training benchmark: LoRA fine-tuning with PEFT under Accelerate's FSDP2, in several processes.

Each process is one rank of a gloo group (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in the environment).
Step k takes `--batch-size` rows for every rank from the file's order, the ranks by turns, so that the caller can give
them rows of one length. Weights are stored in bf16 and gathered in it, adapters are fp32 and their gradients are summed
in fp32; no checkpointing, no evaluation or saving. The loss is the sum over the targets of all ranks divided by their
number.

Accelerate 1.15 knows FSDP on accelerators only: on a CPU it falls back to DDP whatever the plugin says. Here its state
is told that it is FSDP; that apart, all is Accelerate's own (`prepare`, `backward`, `clip_grad_norm_`). gloo cannot
average while it sums, so FSDP2 is asked to sum and the loss is scaled.

What is measured is what `trl_sft.py` measures, in every rank: wall time, CPU time, peak resident memory. The tokens
are those of this rank.

Needs torch, transformers, peft and accelerate. Example of one of two ranks:

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 python accelerate_sft.py --model DIR --rows rows.jsonl \
        --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hf_rows import IGNORED, pad, read_tokens
from measuring import BatchSize, Clock, figures
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from trainer_sft import lora_model, make_parser
from transformers import AutoTokenizer


def make_accelerator(precision: str) -> Accelerator:
    """Accelerate with FSDP2 on a CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    mixed = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    if mixed == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # Both remember it, and each copies it from the other when somebody asks for the state anew.
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def batches(options: argparse.Namespace, rank: int, ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches."""
    tokenizer = AutoTokenizer.from_pretrained(str(options.model))
    rows = read_tokens(options.rows, tokenizer, options.max_length)
    size = options.batch_size * ranks
    if len(rows) < size * options.steps:
        raise ValueError(f"{len(rows)} rows are too few for {options.steps} steps of {size}")
    for step in range(options.steps):
        yield pad(rows[step * size : (step + 1) * size][rank::ranks], tokenizer.pad_token_id or 0)


def train(options: argparse.Namespace, accelerator: Accelerator, clock: Clock) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = list(batches(options, rank, ranks))
    model = lora_model(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.train()
    clock.begin()
    for number, batch in enumerate(data, start=1):
        targets = torch.tensor(float((batch["labels"][:, 1:] != IGNORED).sum()))
        dist.all_reduce(targets)
        loss = model(**batch, num_items_in_batch=targets).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 - (number - 1) / options.steps)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(float(loss.detach()))
        clock.step_done(number)
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    return {
        "peer": "accelerate",
        "precision": options.precision,
        **figures(clock, [BatchSize.of(batch) for batch in data[options.warmup_steps :]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
        "steps": options.steps,
        "warmup_steps": options.warmup_steps,
        "settings": {
            "distributed_type": str(accelerator.state.distributed_type),
            "fsdp_version": accelerator.state.fsdp_plugin.fsdp_version,
            "sharded_modules": sharded,
            "parameters_held": held,
            "trainable_parameters": count,
            "threads": torch.get_num_threads(),
            "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        },
    }


def main(argv: list[str] | None = None) -> int:
    options = make_parser("LoRA fine-tuning with PEFT and Accelerate's FSDP2 on CPUs, timed.").parse_args(argv)
    clock = Clock(options.warmup_steps)
    torch.manual_seed(options.seed)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    result = train(options, make_accelerator(options.precision), clock)
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
