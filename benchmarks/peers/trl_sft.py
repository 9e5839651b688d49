"""The peer's half of the CPU training benchmark: LoRA fine-tuning with TRL's `SFTTrainer`.

What it measures: the optimizer steps of one process after the first `--warmup-steps` of `--steps` in all. Over that
span it gives real (non-pad) tokens a second, CPU seconds a token and, for every step from the first on, the loss;
beside that the process's peak resident memory and the seconds from its start to the end of its first optimizer step
(imports, loading, tokenizing, that step). The span is the whole training loop: collating, forward, backward,
clipping, AdamW, TRL's own metrics (entropy, token accuracy) and its logging at every step.

What it does not measure: saving, evaluation, generation, accelerators, several processes, or how well the trained
model answers. It sets no thread counts and no allocator settings: those belong to the caller.

`--mode default` leaves everything that affects speed at `SFTConfig`'s own defaults; `--mode best` sets what TRL offers
and what was measured to help on a CPU (see `best_settings`). Rows are JSON lines with "prompt" and "completion"
(both strings or both lists of messages) or with "messages", whose last one, the assistant's, becomes the completion;
the loss is on the completion only. Without `--sequential` the trainer draws its own order, so give it whole epochs:
length grouping sorts the rows, and a part of an epoch would then be a sample of one length.

`--sequential` keeps the file's order (TRL's own "sequential" sampling), so that another system can be given the same
batches and the losses compared; the same start needs `--save-start` too, since LoRA's A is drawn at random. In that
order there is no length grouping, and mode best goes padding-free instead, unless `--padding` says otherwise.

Needs torch, transformers, peft, trl, datasets and accelerate; tried with TRL 1.16.0. Example:

    OMP_NUM_THREADS=2 python trl_sft.py --model DIR --rows rows.jsonl --mode best --steps 64 --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from measuring import Clock, CountingCollator, figures
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

Row = dict[str, Any]
Settings = dict[str, Any]


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


def _as_prompt_completion(row: Row) -> Row:
    """One row in TRL's prompt/completion form; of a conversation, the last message is what is learnt."""
    if "messages" not in row:
        return {"prompt": row["prompt"], "completion": row["completion"]}
    *prompt, answer = row["messages"]
    if answer["role"] != "assistant" or not prompt:
        raise ValueError("a row of messages must end with an assistant's message that follows another one")
    return {"prompt": prompt, "completion": [answer]}


def read_rows(path: Path) -> Dataset:
    with path.open(encoding="utf-8") as lines:
        return Dataset.from_list([_as_prompt_completion(json.loads(line)) for line in lines if line.strip()])


def _default_settings(precision: str) -> Settings:
    """Nothing but a precision other than TRL's own, which is bf16 autocast over fp32 weights, on a CPU too."""
    return {} if precision == "bf16" else {"bf16": False}


def best_settings(precision: str) -> Settings:
    """What TRL offers that was measured to be faster on a CPU and to train equally.

    Not here, since they did not help or do not apply: packing (other rows to a step, and no faster than padding-free),
    `loss_type` (the plain "nll" is already the one computed in tiles), Liger's and the Hub's kernels (Triton), fp32
    base weights under autocast (the same speed, more memory). `torch_compile` was not through six steps in 280 seconds
    on one core, where the rest takes about a minute; what it comes to on long runs was not measured.
    """
    bf16 = precision == "bf16"
    return {
        "gradient_checkpointing": False,
        "train_sampling_strategy": "group_by_length",
        "bf16": bf16,
        "model_init_kwargs": {"dtype": "bfloat16" if bf16 else "float32"},
    }


def _is_padding_free(options: argparse.Namespace) -> bool:
    """Whether a batch is flattened into one row, to which a CPU's attention applies a dense block-diagonal mask.

    That attends over the sum of the rows' lengths, so it pays where padding is much (short rows in the file's order)
    and costs where it is little (rows grouped by length).
    """
    if options.padding != "auto":
        return bool(options.padding == "free")
    return bool(options.mode == "best" and options.sequential)


def build_config(options: argparse.Namespace, output_dir: str) -> SFTConfig:
    settings = best_settings(options.precision) if options.mode == "best" else _default_settings(options.precision)
    if options.sequential:
        settings["train_sampling_strategy"] = "sequential"
    common: Settings = {
        "output_dir": output_dir,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": 1,
        "learning_rate": options.lr,
        "lr_scheduler_type": options.schedule,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": options.max_length,
        "seed": options.seed,
    }
    return SFTConfig(**(common | settings))


def build_trainer(options: argparse.Namespace, output_dir: str, clock: Clock) -> SFTTrainer:
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    trainer = SFTTrainer(
        model=str(options.model),
        args=build_config(options, output_dir),
        train_dataset=read_rows(options.rows),
        peft_config=lora,
        callbacks=[StepWatch(clock)],
    )
    trainer.remove_callback(PrinterCallback)
    # What `padding_free=True` comes to; as an argument TRL takes it only together with `max_length=None`, untruncated.
    trainer.data_collator.padding_free = _is_padding_free(options)
    trainer.data_collator = CountingCollator(trainer.data_collator)
    return trainer


def _settings_used(trainer: SFTTrainer) -> Settings:
    """What the run was made with, read back from the trainer and not from what was asked for."""
    args = trainer.args
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    names = ("gradient_checkpointing", "bf16", "loss_type", "packing", "train_sampling_strategy")
    return {name: getattr(args, name) for name in names} | {
        "padding_free": trainer.data_collator.inner.padding_free,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "attention": trainer.model.config._attn_implementation,
        "base_dtype": str(trainer.model.get_input_embeddings().weight.dtype),
        "adapter_dtype": str(trainable[0].dtype),
        "trainable_parameters": sum(p.numel() for p in trainable),
        "threads": torch.get_num_threads(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }


def summarize(options: argparse.Namespace, trainer: SFTTrainer, clock: Clock) -> dict[str, Any]:
    return {
        "peer": "trl",
        "mode": options.mode,
        "precision": options.precision,
        **figures(clock, trainer.data_collator.sizes[options.warmup_steps : options.steps]),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        "steps": options.steps,
        "warmup_steps": options.warmup_steps,
        "settings": _settings_used(trainer),
    }


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning with TRL on a CPU, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines")
    parser.add_argument("--mode", choices=("default", "best"), default="default")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="TRL's own default is bf16")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps in all, warm-up included")
    parser.add_argument("--warmup-steps", type=int, default=2, help="first steps left out of the timing")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--schedule", choices=("linear", "constant"), default="linear")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank; alpha is twice that")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--sequential", action="store_true", help="keep the file's row order, in either mode")
    parser.add_argument("--padding", choices=("auto", "padded", "free"), default="auto", help="auto: see the code")
    parser.add_argument("--save-start", type=Path, help="write the untrained adapter here, for another system to load")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args(argv)
    if not 0 <= options.warmup_steps < options.steps:
        parser.error("--warmup-steps must be at least 0 and less than --steps")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    clock = Clock(options.warmup_steps)
    with tempfile.TemporaryDirectory(prefix="trl_sft_") as output_dir:
        trainer = build_trainer(options, output_dir, clock)
        if options.save_start is not None:
            trainer.model.save_pretrained(options.save_start)
        trainer.train()
    return summarize(options, trainer, clock)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    line = json.dumps(run(options))
    if options.out is not None:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
