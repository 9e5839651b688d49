"""finray's half of the comparison with TRL's trainers of preferences: one step over all rows, or a timed training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finray_api
import measuring
import torch
from finray_train import records_of
from policy import Gradients, set_policy


@dataclass(frozen=True)
class Runs:
    """What is to be run."""

    runs: str  # a file: each has a name, a config, and the other fields of `one_step` or `timed`


def one_step(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loss and gradients of one step."""
    config = finray_api.build_config(run["config"], source="benchmark")
    run_dir = Path(config.run.output_dir) / config.run.name
    run_dir.mkdir(parents=True)
    prepared = str(finray_api.prepare_here(config))
    loop = finray_api.assembled(config, prepared, run_dir)
    model = loop.task.model
    if config.train.objective == "kto":
        split, rows = loop.source.split, range(len(loop.source.split))
        others = [split.mismatched(row, most=config.data.max_length) for row in rows]
        answers = [ids[int(mask.argmax()) :].tolist() for ids, mask in others]
        (folder / f"{run['name']}.json").write_text(json.dumps(answers), encoding="utf-8")
    set_policy(model, run["spread"])
    if not run["keeps_reference"]:
        inner = loop.task.objective.values
        loop.task.objective.values = lambda split, rows: {
            name: torch.zeros_like(torch.as_tensor(values)).numpy() for name, values in inner(split, rows).items()
        }
    gradients = Gradients(model)
    loop.run()
    gradients.save(folder / f"{run['name']}.ours.safetensors")
    (record,) = records_of(run_dir)
    return {"name": run["name"], "loss": record["loss"]}


def timed(run: dict[str, Any]) -> dict[str, Any]:
    """A training in turn with other processes; the first turn is the reference's pass over the data."""
    from finray.training import assemble

    config = finray_api.build_config(run["config"], source="benchmark")
    finray_api.keep_freed_memory(but_large=False)
    run_dir = Path(config.run.output_dir) / config.run.name
    run_dir.mkdir(parents=True)
    prepared = str(finray_api.prepare_here(config))
    turns, inner = measuring.Turns(run["turns"], 1 + (config.train.max_steps or 0)), assemble.add_columns

    def add_columns(*arguments: Any) -> None:
        turns.wait()
        inner(*arguments)
        turns.pass_on()

    assemble.add_columns = add_columns
    clock = measuring.Clock()
    loop = finray_api.assembled(config, prepared, run_dir)

    def stepped() -> None:
        clock.step_done()
        turns.pass_on()

    finish = finray_api.on_every_step(loop, stepped)
    loop.run()
    finish()
    records = records_of(run_dir)
    return {
        "seconds": turns.seconds,
        "peak_rss_bytes": clock.peak_rss_bytes,
        "losses": [record["loss"] for record in records],
        "samples": [record["samples"] for record in records],
    }


def main() -> None:
    job: Runs = measuring.job(Runs)
    runs = json.loads(Path(job.runs).read_text(encoding="utf-8"))
    results = [timed(run) if "turns" in run else one_step(run, Path(job.runs).parent) for run in runs]
    measuring.emit({"runs": results}, "finray", "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
