"""TRL from a cold start to the end of its first optimizer step, on packed rows.

The trainer is given the rows as `datasets` reads them and prepares them itself, in `--processes` processes. The rest is
what `trl_sft.py` found to be best on a CPU: bf16 weights, no checkpointing; grouping by length has nothing to group
once rows are packed. At the end of the first step `--done` is written, and training ends.

It measures nothing itself: the caller waits for the file. Needs what `trl_sft.py` needs. Example:

    HF_DATASETS_CACHE=/tmp/fresh python trl_first_step.py --model DIR --rows rows.jsonl --done /tmp/done
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_sft import best_settings


class FirstStep(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
    """Says that the first step has ended, and stops."""

    def __init__(self, done: Path) -> None:
        self._done = done

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._done.write_text(f"{state.global_step}\n", encoding="utf-8")
        control.should_training_stop = True
        return control


def build_config(options: argparse.Namespace, folder: str) -> SFTConfig:
    settings = best_settings("bf16")
    del settings["train_sampling_strategy"]
    return SFTConfig(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        max_length=options.max_length,
        packing=True,
        dataset_num_proc=options.processes,
        seed=options.seed,
        **settings,
    )


def run(options: argparse.Namespace) -> None:
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory(prefix="trl_first_step_") as folder:
        trainer = SFTTrainer(
            model=str(options.model),
            args=build_config(options, folder),
            train_dataset=Dataset.from_json(str(options.rows)),
            peft_config=lora,
            callbacks=[FirstStep(options.done)],
        )
        trainer.train()


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TRL up to its first optimizer step on a CPU.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--done", type=Path, required=True, help="file that is written when the step has ended")
    parser.add_argument("--batch-size", type=int, default=1, help="packs in a step")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    run(parse_options(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
