"""Shared code of the peers that train with Transformers: rows, LoRA, given batches, a record of what was seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

IGNORED = -100
Batch = dict[str, torch.Tensor]
Tokens = dict[str, list[int]]


def read_tokens(path: str, tokenizer: Any, max_length: int) -> list[Tokens]:
    """The rows of a file as token ids and labels.

    The last answer is trained on, up to its end-of-turn token, as in finray.

    Raises:
        ValueError: the rendered conversation does not start with the rendered prompt.
    """
    found = []
    for line in filter(str.strip, Path(path).read_text(encoding="utf-8").split("\n")):
        row = json.loads(line)
        if "messages" in row:
            prompt, ids = (
                tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
                for messages, options in (
                    (row["messages"][:-1], {"add_generation_prompt": True}),
                    (row["messages"], {}),
                )
            )
        else:
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        if ids[: len(prompt)] != prompt:
            raise ValueError("the prompt is not how the whole row begins")
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        labels = [IGNORED] * len(prompt) + ids[len(prompt) : end] + [IGNORED] * (len(ids) - end)
        found.append({"input_ids": ids[:max_length], "labels": labels[:max_length]})
    return found


def pad(rows: Sequence[Tokens], padding: int) -> Batch:
    """A batch, padded on the right to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": filled("input_ids", padding), "labels": filled("labels", IGNORED), "attention_mask": mask}


def lora_config(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def trained_model(job: measuring.Job) -> Any:
    """The model with adapters over frozen weights in the run's precision; or all of it, with weights in fp32."""
    dtype = torch.bfloat16 if job.precision == "bf16" and job.rank else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    model.config.use_cache = False
    return get_peft_model(model, lora_config(job.rank)) if job.rank else model


def start_adapter(model: Any, job: measuring.Job) -> None:
    """Load the adapter that a job starts from, or save its initial adapter."""
    if job.start is not None:
        set_peft_model_state_dict(model, load_file(Path(job.start) / "adapter_model.safetensors"))
    if job.save_start is not None:
        model.save_pretrained(job.save_start)


@dataclass
class Recorder:
    """A collator that records its batches, in training order.

    Rows are identified by their token ids. The data loader prefetches, so only the order determines a batch's step.
    """

    inner: Callable[[list[Any]], Any]
    dataset: Any
    batches: list[tuple[list[int], int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = {tuple(row["input_ids"]): number for number, row in enumerate(self.dataset)}

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.inner(examples)
        numbers = [self._numbers[tuple(example["input_ids"])] for example in examples]
        area = batch["input_ids"].numel()
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else area
        # Labels are shifted by one, so the first never counts.
        self.batches.append((numbers, tokens, area, int((batch["labels"][:, 1:] != IGNORED).sum())))
        return batch

    def seen(self, count: int) -> dict[str, Any]:
        """For each of the first batches: its row numbers, tokens, tokens including padding, and targets."""
        names = ("rows", "own_tokens", "padded_tokens", "targets")
        return dict(zip(names, zip(*self.batches[:count], strict=True), strict=True))


class StepWatch(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
    """Reports the steps to a clock, and keeps the losses."""

    def __init__(self, clock: measuring.Clock) -> None:
        self._clock = clock
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.step_done()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


def train(trainer: Any, job: measuring.Job, named: Sequence[str]) -> dict[str, Any]:
    """Train with a Trainer (or a subclass) on a job's batches, in the job's order.

    Args:
        trainer: with its dataset in the file's order, to which the steps' numbers refer.
        job: the job.
        named: trainer arguments to include in the result.
    """
    clock = measuring.Clock()
    watch = StepWatch(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    start_adapter(trainer.model, job)
    recorder = Recorder(trainer.data_collator, trainer.train_dataset)
    # The Trainer's own loader, except for the choice of rows in a batch.
    loader = DataLoader(trainer.train_dataset, batch_sampler=job.steps, collate_fn=recorder)
    trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)
    trainer.train()
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    settings = {
        **{name: str(getattr(trainer.args, name)) for name in named},
        "attention": trainer.model.config._attn_implementation,
        "base_dtype": str(trainer.model.get_input_embeddings().weight.dtype),
        "adapter_dtype": str(parameters[0].dtype),
        "threads": torch.get_num_threads(),
    }
    return measuring.trained(
        clock,
        settings,
        **recorder.seen(len(job.steps)),
        losses=watch.losses,
        norms=watch.norms,
        trainable_parameters=sum(parameter.numel() for parameter in parameters),
    )


def arguments(job: measuring.Job, folder: str) -> dict[str, Any]:
    """Arguments shared by Transformers' Trainer and TRL's."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": len(job.steps),
        "per_device_train_batch_size": max((len(step) for step in job.steps), default=1),
        "gradient_accumulation_steps": 1,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": job.seed,
    }
