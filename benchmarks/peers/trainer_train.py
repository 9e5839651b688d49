"""A peer: LoRA fine-tuning with only Transformers' `Trainer` and PEFT.

The best set-up that a user can choose on a CPU without writing code: base weights in bf16, autocast to bf16, adapters
in fp32, no checkpointing, no evaluation or saving. The logits are the model's own: full logits for every position.
`torch_compile` did not finish six steps in 280 seconds on one core; without it they take about a minute.

    OMP_NUM_THREADS=2 python trainer_train.py '{"model": "DIR", "rows": "rows.jsonl", "steps": [[0, 1], [2, 3]]}'
"""

from __future__ import annotations

import tempfile
from functools import partial

import hf
import measuring
import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

job: measuring.Job = measuring.job(measuring.Job)
torch.manual_seed(job.seed)
tokenizer = AutoTokenizer.from_pretrained(job.model)
with tempfile.TemporaryDirectory(prefix="trainer_") as folder:
    trainer = Trainer(
        model=hf.trained_model(job),
        args=TrainingArguments(
            **hf.arguments(job, folder),
            bf16=job.precision == "bf16",
            remove_unused_columns=False,
            label_names=["labels"],
        ),
        train_dataset=hf.read_tokens(job.rows, tokenizer, job.max_length),
        data_collator=partial(hf.pad, padding=tokenizer.pad_token_id or 0),
    )
    result = hf.train(trainer, job, ("gradient_checkpointing", "bf16", "optim"))
measuring.emit(result, "torch", "transformers", "peft", "accelerate")
