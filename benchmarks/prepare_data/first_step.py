"""From the command, with nothing prepared, to the end of the first optimizer step: `finray train` and TRL."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from finray.planning.placement import ALLOCATOR
from finray.tracking.jsonl import FILE as METRICS_FILE
from finray.tracking.jsonl import read_records
from harness.processes import Watched, run_until
from harness.report import Spread, say, table
from prepare_data.plan import PEERS, Plan, empty_folder, rows_file, run_environment

AIM = 0.25
RUN_NAME = "first_step"

Runs = dict[str, list[Watched]]


def _config(plan: Plan, rows: Path, folder: Path) -> Path:
    """The same work as `trl_first_step.py`: one pack a step, the same adapter, arithmetic and masking."""
    config = {
        "run": {"name": RUN_NAME, "output_dir": str(folder), "seed": plan.seed},
        "model": {"name": str(plan.model)},
        "adapter": {"rank": 8, "alpha": 16, "target_modules": "all-linear"},
        "data": {"source": str(rows), "max_length": plan.max_length, "packing": True},
        "train": {
            "epochs": 3,
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "learning_rate": 1e-4,
            "precision": "bf16",
        },
        "checkpoint": {"every_steps": 1_000_000},
        "cluster": {"cpus_per_worker": plan.threads, "use_gpu": False},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def _run_finray(plan: Plan, rows: Path) -> Watched:
    """The command line as it is; ended when the first step's record is there."""
    with empty_folder(plan) as folder:
        command = [sys.executable, "-m", "finray.cli.main", "train", str(_config(plan, rows, folder))]
        metrics = folder / RUN_NAME / METRICS_FILE

        def stepped() -> bool:
            return any(record["kind"] == "train" for record in read_records(metrics))

        return run_until(command, stepped, env=run_environment(plan, folder))


def _run_trl(plan: Plan, rows: Path) -> Watched:
    with empty_folder(plan) as folder:
        done = folder / "done"
        script = str(PEERS / "trl_first_step.py")
        command = [plan.peer_python, script, *plan.common, "--rows", str(rows), "--done", str(done)]
        command += ["--processes", str(plan.threads), "--seed", str(plan.seed)]
        # finray gives its workers these allocator settings by itself.
        return run_until(command, done.is_file, env=run_environment(plan, folder, allocator=ALLOCATOR))


SYSTEMS = {"finray": _run_finray, "TRL": _run_trl}


def measure_first_step(plan: Plan) -> Runs:
    """Both in turn."""
    runs: Runs = {name: [] for name in SYSTEMS}
    with rows_file(plan, plan.start_rows) as rows:
        for number in range(plan.pairs):
            for name, run in SYSTEMS.items():
                watched = run(plan, rows)
                runs[name].append(watched)
                say(f"first step {number + 1}/{plan.pairs} {name}: {watched.seconds:.1f} s")
    return runs


def show_first_step(runs: Runs, plan: Plan) -> str:
    """Seconds, memory and their ratios."""
    seconds = {name: Spread.of([run.seconds for run in made]) for name, made in runs.items()}
    memory = {name: Spread.of([run.peaks.resident / 2**30 for run in made]) for name, made in runs.items()}
    lines = [[name, seconds[name].show(1), memory[name].show(2)] for name in runs]
    ratios = [each["finray"].median / each["TRL"].median for each in (seconds, memory)]
    lines.append(["finray ÷ TRL", *(f"{ratio:.2f}×" for ratio in ratios)])
    verdict = "met" if ratios[0] <= AIM else "missed"
    text = (
        f"`finray train` (Ray started by it) and TRL's `SFTTrainer` from the command to the end of the first optimizer "
        f"step on {plan.start_rows:,} rows, nothing cached but the files in the page cache. Both: the same model, LoRA "
        f"rank 8 on all linear layers, bf16 weights, no checkpointing, packs of {plan.max_length} tokens, one pack in "
        f"the step. TRL prepares in {plan.threads} processes and has finray's allocator settings. Peak memory up to "
        "then, summed over the processes of each."
    )
    head = ["", "seconds", "peak memory, GiB"]
    return f"{text}\n\n{table(head, lines)}\n\nAim: at most {AIM} of TRL's time; {verdict}. Runs of each: {plan.pairs}."
