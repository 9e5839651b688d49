"""A peer: a classifier with LoRA and Transformers' `Trainer`, with padding; random or length-grouped batches.

bf16 autocast over fp32 weights if the job says bf16; no evaluation or saving. A batch is padded to its longest row.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass(frozen=True)
class Classifying:
    """The training job."""

    model: str  # directory
    rows: str  # JSON Lines with `sentence` and `label`
    grouped: bool  # whether to use Trainer's own grouping by length
    steps: int
    warmup: int
    batch_size: int
    precision: str
    seed: int
    threads: int
    turns: list[str]  # two FIFOs: one is read before a step, the other written after it


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
    """Lets others do a step after each step."""

    def __init__(self, turns: measuring.Turns) -> None:
        self._turns = turns

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._turns.pass_on()


def main() -> None:
    """Train, and print the tokens (without padding) and seconds of the timed steps."""
    job = measuring.job(Classifying)
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    rows = [json.loads(line) for line in Path(job.rows).read_text(encoding="utf-8").splitlines()]
    data = [
        dict(tokenizer(row["sentence"], truncation=True, max_length=128)) | {"labels": row["label"]} for row in rows
    ]
    plain = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=2)
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"])
    turns, seen = measuring.Turns(job.turns, job.steps), list[int]()
    pad = DataCollatorWithPadding(tokenizer)

    def collate(batch: list[dict[str, Any]]) -> Any:
        seen.append(sum(len(one["input_ids"]) for one in batch))
        return pad(batch)

    with tempfile.TemporaryDirectory(prefix="trainer_") as folder:
        trainer = Trainer(
            model=get_peft_model(plain, lora),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1000,
                max_steps=job.steps,
                per_device_train_batch_size=job.batch_size,
                learning_rate=1e-3,
                lr_scheduler_type="linear",
                weight_decay=0.0,
                max_grad_norm=1.0,
                bf16=job.precision == "bf16",
                seed=job.seed,
                remove_unused_columns=False,
                train_sampling_strategy="group_by_length" if job.grouped else "random",
            ),
            train_dataset=data,
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Watch(turns))
        turns.wait()
        trainer.train()
    tokens = sum(seen[job.warmup : job.steps - 1])
    seconds = sum(turns.seconds[job.warmup : -1])
    measuring.emit({"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}, "transformers")


if __name__ == "__main__":
    main()
