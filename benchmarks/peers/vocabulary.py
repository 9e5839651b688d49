"""What a large vocabulary costs in memory: one training step of a narrow model, with finray's loss or with full logits.

`--mode finray` is finray's task on packed rows; `--mode full` is Transformers' own: `model(input_ids, labels).loss`
on the same rows as a batch, which needs no padding, since all are of one length. Both have the same weights, LoRA on
all linear layers with the same start, and bf16 autocast over bf16 weights; both do forward and backward, and print the
loss, the norm of the gradient and the seconds of the second step.

Memory is the process's peak, and its growth over what was resident before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from measuring import peak_rss_bytes

from finray.config.schema import AdapterConfig
from finray.data.sampling.collate import collate
from finray.models import adapters, attention, fused_lora
from finray.pretrained.tokenizers import silence_transformers
from finray.tasks.causal_lm import CausalLM

# Every sixth token or so is a question's.
ANSWER_SHARE = 0.85


def build(options: argparse.Namespace, implementation: str) -> Any:
    """A Llama with a narrow body and a wide vocabulary, with adapters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)
    model.requires_grad_(False)
    wrapped = adapters.add_lora(model, AdapterConfig(rank=8, alpha=16, target_modules="all-linear"), seed=1)
    wrapped.config.use_cache = False
    # B starts at zero, and so would the gradient of A.
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.05)
    return wrapped.train()


def rows_of(options: argparse.Namespace) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and masks, both (rows, length)."""
    generator = np.random.default_rng(5)
    ids = generator.integers(0, options.vocabulary, (options.rows, options.length), dtype=np.int32)
    mask = np.zeros((options.rows, options.length), dtype=np.uint8)
    mask[:, round((1 - ANSWER_SHARE) * options.length) :] = 1
    return ids, mask


def finray_loss(options: argparse.Namespace) -> tuple[Callable[[], torch.Tensor], Any, int]:
    attention.register()
    model = build(options, attention.NAME)
    fused_lora.fuse(model)
    task = CausalLM(model, precision="bf16", attention_name=attention.NAME, device=torch.device("cpu"))
    batch = collate(list(zip(*rows_of(options), strict=True)), range(options.rows))
    targets = len(batch.targets_K)
    return lambda: task.loss_sum(batch) / targets, model, targets


def full_loss(options: argparse.Namespace) -> tuple[Callable[[], torch.Tensor], Any, int]:
    model = build(options, "sdpa")
    ids, mask = (torch.from_numpy(values.astype(np.int64)) for values in rows_of(options))
    labels = torch.where(mask.bool(), ids, -100)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value: torch.Tensor = model(input_ids=ids, labels=labels).loss
            return value

    return loss, model, int((labels[:, 1:] != -100).sum())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory of a step of a model with a large vocabulary.")
    parser.add_argument("--mode", choices=("finray", "full"), required=True)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args(argv)
    silence_transformers()
    loss, model, targets = (finray_loss if options.mode == "finray" else full_loss)(options)
    before = resident_bytes()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - started
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    result = {
        "mode": options.mode,
        "loss": float(value.detach()),
        "grad_norm": float(torch.stack(norms).norm()),
        "targets": targets,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "step_bytes": peak_rss_bytes() - before,
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
