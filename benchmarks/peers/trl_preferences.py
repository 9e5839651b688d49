"""A peer: TRL's trainers of preferences. One step over all rows, or a timed training.

python trl_preferences.py '{"runs": "runs.json"}'
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf
import measuring
import torch
from datasets import Dataset
from peft import LoraConfig
from policy import Gradients, set_policy
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
}
EXPERIMENTAL = ("cpo", "orpo")


@dataclass(frozen=True)
class Runs:
    """What is to be run."""

    runs: str  # a file: each has a name, the fields of `trainer_of`, and those of `one_step` or `timed`


def trainer_of(
    trainer: str, model: str, rows: str, settings: dict[str, Any], lora: bool, folder: str, **arguments: Any
) -> Any:
    """A trainer on rows of pairs, in their order."""
    kind, config = TRAINERS[trainer]
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = Dataset.from_list([json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()])
    whole = {"output_dir": folder, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    whole |= {"logging_steps": 1, "lr_scheduler_type": "linear", "weight_decay": 0.0, **arguments, **settings}
    given: Any = model
    if trainer in EXPERIMENTAL:
        from transformers import AutoModelForCausalLM

        given = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # They put it before every prompt, and the others do not.
        tokenizer.bos_token = None
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    peft = None
    if lora:
        peft = hf.lora_config(8)
        if trainer == "reward":
            peft = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="SEQ_CLS")
    made = kind(
        model=given,
        args=config(**whole),
        train_dataset=dataset,
        processing_class=tokenizer,
        **({"peft_config": peft} if peft else {}),
    )
    made.remove_callback(PrinterCallback)
    return made


def one_step(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loss and gradients of one step over all rows, from weights that are not the reference's."""
    name, spread, count = run.pop("name"), run.pop("spread"), run.pop("count")
    # KTO estimates its KL over a batch.
    size = count if run["trainer"] == "kto" else 1
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count // size, "max_steps": 1}
    options |= {"learning_rate": 1e-9, "max_grad_norm": 0.0, "bf16": False, "gradient_checkpointing": False}
    if run["trainer"] not in EXPERIMENTAL:
        options["model_init_kwargs"] = {"dtype": "float32"}
    with tempfile.TemporaryDirectory(prefix="trl_") as work:
        trainer = trainer_of(**run, **options, folder=work)
        if run["trainer"] == "kto":
            # Answers to other prompts, by which it estimates the KL: finray draws others than TRL.
            answers = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            rows = trainer.train_dataset.remove_columns("KL_completion_ids")
            trainer.train_dataset = rows.add_column("KL_completion_ids", answers)
        set_policy(trainer.model, spread)
        gradients, losses = Gradients(trainer.model), list[float]()
        inner = trainer.compute_loss

        def compute_loss(*arguments: Any, **named: Any) -> Any:
            loss = inner(*arguments, **named)
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

        trainer.compute_loss = compute_loss
        trainer.train()
        gradients.save(folder / f"{name}.theirs.safetensors")
    return {"name": name, "loss": sum(losses) / len(losses)}


def timed(run: dict[str, Any]) -> dict[str, Any]:
    """A training on given batches, in turn with other processes; the first turn is the reference's pass over the data,
    if there is one before the training."""
    batches, turns = run.pop("batches"), measuring.Turns(run.pop("turns"), 1 + run["options"]["max_steps"])
    clock, inner = measuring.Clock(), DPOTrainer._precompute_ref_logps
    watch = hf.StepWatch(clock)

    def precompute(*arguments: Any) -> Any:
        turns.wait()
        dataset = inner(*arguments)
        turns.pass_on()
        return dataset

    class PassOn(TrainerCallback):  # type: ignore[misc]  # transformers may come without types
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.pass_on()

    DPOTrainer._precompute_ref_logps = precompute
    with tempfile.TemporaryDirectory(prefix="trl_") as work:
        trainer = trainer_of(**run.pop("options"), **run, folder=work)
        if not trainer.args.precompute_ref_log_probs:
            turns.wait()
            turns.pass_on()
        trainer.add_callback(watch)
        trainer.add_callback(PassOn())
        options: dict[str, Any] = {"batch_sampler": batches, "collate_fn": trainer.data_collator}
        loader = torch.utils.data.DataLoader(trainer.train_dataset, **options)
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)
        trainer.train()
    return {"seconds": turns.seconds, "peak_rss_bytes": clock.peak_rss_bytes, "losses": watch.losses}


def main() -> None:
    job: Runs = measuring.job(Runs)
    runs = json.loads(Path(job.runs).read_text(encoding="utf-8"))
    results = [timed(run) if "turns" in run else one_step(run, Path(job.runs).parent) for run in runs]
    measuring.emit({"runs": results}, "torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main()
