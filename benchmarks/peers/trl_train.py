"""A peer: LoRA fine-tuning with TRL's `SFTTrainer`.

With `mode` `defaults`, everything that affects speed is left at `SFTConfig`'s defaults; `best` uses the options of TRL
that were measured to help on a CPU with equal training results. Not used, because they did not help or do not apply:
packing (different rows per step, and no faster than padding-free), padding-free (on a CPU, attention uses a dense mask
for a concatenated batch, which costs more when rows of similar length are grouped), `loss_type` (the plain "nll" is
already computed in tiles), Liger's and the Hub's kernels (Triton), fp32 base weights under autocast (the same speed,
more memory), `torch_compile` (see `trainer_train.py`).

With `done`, nothing is measured: the caller waits for that file, which is written at the end of the first step.

TRL's own metrics (entropy, token accuracy) and its logging at every step are included in the time.

    OMP_NUM_THREADS=2 python trl_train.py '{"model": "DIR", "rows": "rows.jsonl", "steps": [[0, 1], [2, 3]]}'
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import hf
import measuring
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


def best_settings(precision: str) -> dict[str, Any]:
    """No checkpointing, and base weights in the compute dtype."""
    bf16 = precision == "bf16"
    dtype = "bfloat16" if bf16 else "float32"
    return {"gradient_checkpointing": False, "bf16": bf16, "model_init_kwargs": {"dtype": dtype}}


def default_settings(precision: str) -> dict[str, Any]:
    """TRL's defaults, except for the precision; TRL's own is bf16 autocast over fp32 weights, also on a CPU."""
    return {} if precision == "bf16" else {"bf16": False}


def prompts_and_completions(path: str) -> Dataset:
    """The rows in TRL's format; in a conversation, the last message is trained on."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    return Dataset.from_list(
        [
            {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} if "messages" in row else row
            for row in rows
        ]
    )


def first_step(job: measuring.Job) -> None:
    """Run from a cold start to the end of the first step, on packed rows that the trainer prepares itself."""

    class FirstStep(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
            Path(str(job.done)).write_text(f"{state.global_step}\n", encoding="utf-8")
            control.should_training_stop = True
            return control

    with tempfile.TemporaryDirectory(prefix="trl_") as folder:
        settings = hf.arguments(job, folder) | {"max_steps": -1, "per_device_train_batch_size": 1}
        settings |= {"packing": True, "dataset_num_proc": job.processes, "max_length": job.max_length}
        trainer = SFTTrainer(
            model=job.model,
            args=SFTConfig(**settings, **best_settings("bf16")),
            train_dataset=Dataset.from_json(job.rows),
            peft_config=hf.lora_config(job.rank),
            callbacks=[FirstStep()],
        )
        trainer.train()


def main() -> None:
    job: measuring.Job = measuring.job(measuring.Job)
    if job.done is not None:
        first_step(job)
        return
    settings = best_settings if job.mode == "best" else default_settings
    with tempfile.TemporaryDirectory(prefix="trl_") as folder:
        trainer = SFTTrainer(
            model=job.model,
            args=SFTConfig(**hf.arguments(job, folder), max_length=job.max_length, **settings(job.precision)),
            train_dataset=prompts_and_completions(job.rows),
            peft_config=hf.lora_config(job.rank),
        )
        names = ("gradient_checkpointing", "bf16", "optim", "loss_type", "packing")
        result = hf.train(trainer, job, names)
    measuring.emit(result, "torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main()
