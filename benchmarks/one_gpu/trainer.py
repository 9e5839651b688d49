"""Transformers' Trainer with PEFT on the same rows, set up as well as it allows without other packages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from finray.training.loop import peak_memory
from harness.flops import count_work, wait
from one_gpu.models import RANK, Shape, random_model
from one_gpu.rows import Row

IGNORED = -100


def has_liger() -> bool:
    """Whether Liger's kernels are installed."""
    return find_spec("liger_kernel") is not None


def _pad(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", IGNORED), "attention_mask": mask}


def _in_order(rows: Sequence[Row], batch: int, *, seed: int) -> list[Row]:
    """Batches of rows of one length, as sorting a large data set gives, in a random order."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    batches = [ordered[at : at + batch] for at in range(0, len(ordered) - batch + 1, batch)]
    picked = np.random.default_rng(seed).permutation(len(batches))
    # The longest first, so that memory is there.
    picked = np.concatenate([[len(batches) - 1], picked[picked != len(batches) - 1]])
    return [row for number in picked for row in batches[number]]


def measure_trainer(
    shape: Shape,
    rows: Sequence[Row],
    device: torch.device,
    *,
    batch: int,
    accumulation: int,
    steps: int,
    warmup: int,
    liger: bool,
    seed: int,
    peak: float,
) -> dict[str, Any]:
    """Steps of `accumulation` batches of rows of one length: bf16 weights, autocast, no checkpointing, SDPA."""
    from peft import LoraConfig, get_peft_model
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == warmup:
                wait(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                marks.append(time.perf_counter())
            elif state.global_step == warmup + steps:
                wait(device)
                marks.append(time.perf_counter())

    model = random_model(shape, torch.bfloat16, "sdpa", device, seed=seed)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    ordered = _in_order(rows, batch, seed=seed)
    size = batch * accumulation
    needed = (warmup + steps) * size
    ordered = (ordered * (-(-needed // len(ordered))))[:needed]
    data = [
        {"input_ids": ids.tolist(), "labels": np.where(mask.astype(bool), ids, IGNORED).tolist()}
        for ids, mask in ordered
    ]
    with tempfile.TemporaryDirectory(prefix="gpu_trainer_") as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=device.type == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10_000,
            max_steps=warmup + steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-4,
            bf16=True,
            use_liger_kernel=liger,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_num_workers=0 if device.type == "cpu" else 2,
            seed=seed,
        )
        trainer = Trainer(
            model=get_peft_model(model, lora),
            args=args,
            train_dataset=data,
            data_collator=partial(_pad),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    timed = ordered[warmup * size :]
    lengths = [len(ids) for ids, _ in timed]
    seconds, tokens = marks[1] - marks[0], sum(lengths)
    learned = sum(int(mask[1:].sum()) for _, mask in timed)
    work = count_work(trainer.model, lengths, share_with_logits=learned / tokens)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "share_of_peak": work.flops * tokens / seconds / peak,
        "peak_memory_bytes": peak_memory(device),
        "busy_share": None,
        "rows_of_a_batch": batch,
    }
