"""A peer of the CPU training benchmark: LoRA fine-tuning with Transformers' `Trainer` and PEFT, and nothing else.

What it measures is what `trl_sft.py` measures: the optimizer steps of one process after the first `--warmup-steps`,
its peak resident memory, and the seconds from its start to the end of its first step.

It is set up as well as a user of a CPU can without writing code of his own: base weights in bf16, autocast to bf16,
adapters in fp32, no checkpointing, no evaluation or saving, and the file's order, so that the caller can give it
batches of rows of one length (better than the Trainer's own grouping does on few rows). The logits are the model's
own: of every position, in full. `torch_compile` is left out for what `trl_sft.py` says of it.

Rows are JSON lines with "messages", or with "prompt" and "completion"; the last answer is learned.

Needs torch, transformers, peft and accelerate. Example:

    OMP_NUM_THREADS=2 python trainer_sft.py --model DIR --rows rows.jsonl --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hf_rows import pad, read_tokens
from measuring import Clock, CountingCollator, figures
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)


class StepWatch(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
    """Tells a clock of the steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.begin()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self._clock.step_done(state.global_step)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self._clock.losses.append(logs["loss"])


def lora_model(options: argparse.Namespace) -> Any:
    """The model with adapters."""
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(options.model), dtype=dtype)
    model.config.use_cache = False
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def build_trainer(options: argparse.Namespace, output_dir: str, clock: Clock) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(str(options.model))
    args = TrainingArguments(
        output_dir=output_dir,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=options.precision == "bf16",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        seed=options.seed,
    )
    trainer = Trainer(
        model=lora_model(options),
        args=args,
        train_dataset=read_tokens(options.rows, tokenizer, options.max_length),
        data_collator=CountingCollator(partial(pad, padding=tokenizer.pad_token_id or 0)),
        callbacks=[StepWatch(clock)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def summarize(options: argparse.Namespace, trainer: Trainer, clock: Clock) -> dict[str, Any]:
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return {
        "peer": "trainer",
        "precision": options.precision,
        **figures(clock, trainer.data_collator.sizes[options.warmup_steps : options.steps]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
        "steps": options.steps,
        "warmup_steps": options.warmup_steps,
        "settings": {
            "gradient_checkpointing": trainer.args.gradient_checkpointing,
            "bf16": trainer.args.bf16,
            "optimizer": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
            "attention": trainer.model.config._attn_implementation,
            "base_dtype": str(trainer.model.get_input_embeddings().weight.dtype),
            "adapter_dtype": str(trained[0].dtype),
            "trainable_parameters": sum(parameter.numel() for parameter in trained),
            "threads": torch.get_num_threads(),
            "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        },
    }


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that this script shares with `accelerate_sft.py`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps in all, warm-up included")
    parser.add_argument("--warmup-steps", type=int, default=2, help="first steps left out of the timing")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step and process")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank; alpha is twice that")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--max-length", type=int, default=1024)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser("LoRA fine-tuning with Transformers' Trainer and PEFT on a CPU, timed.").parse_args(argv)
    clock = Clock(options.warmup_steps)
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="trainer_sft_") as output_dir:
        trainer = build_trainer(options, output_dir, clock)
        trainer.train()
    print(json.dumps(summarize(options, trainer, clock)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
