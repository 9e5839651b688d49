"""Seconds from the command `finray train` to the end of its first optimizer step, by phase."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from cpu.plan import Plan
from harness.processes import environment, run_command
from harness.report import Spread, say, table
from harness.rows import write_rows

START_PHASES = ("Python and config", "start_ray", "prepare", "start_workers", "load", "first step", "together")


def measure_start(plan: Plan) -> list[dict[str, float]]:
    """`finray train` from the command to its first step, with nothing prepared."""
    runs = []
    for number in range(plan.starts):
        phases = _start_once(plan, plan.folder / f"start_{number}")
        runs.append(phases)
        say(f"start {number + 1}/{plan.starts}: " + ", ".join(f"{name} {phases[name]:.1f}" for name in START_PHASES))
    return runs


def _start_config(plan: Plan, folder: Path) -> Path:
    rows = write_rows(folder / "rows.jsonl", plan.rows)
    config = {
        "run": {"name": "start", "output_dir": str(folder), "seed": plan.seed},
        "model": {"name": str(plan.model)},
        "adapter": {"rank": 8, "alpha": 16},
        "data": {"source": str(rows), "max_length": 1024},
        "train": {"max_steps": 1, "global_batch_size": 1, "precision": "bf16"},
        "cluster": {"cpus_per_worker": plan.threads, "use_gpu": False},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def _start_once(plan: Plan, folder: Path) -> dict[str, float]:
    """Seconds by phase: those of the run's summary, and between them the times at which its files were written.

    The summary's `start_workers` also holds the end of the workers, which comes after the first step; here it is what
    lies between the prepared data and the start of the loading.
    """
    folder.mkdir()
    config = _start_config(plan, folder)
    began = time.time()
    command = [sys.executable, "-m", "finray.cli.main", "train", str(config)]
    run_command(command, env=environment(threads=plan.threads))
    run_dir = folder / "start"
    inside = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["summary"]["phases"]
    opened = (run_dir / "config.yaml").stat().st_mtime - began
    loaded = (run_dir / "workers.json").stat().st_mtime - began
    known = opened + inside["start_ray"] + inside["prepare"] + inside["load"]
    phases = {
        "Python and config": opened,
        "start_ray": inside["start_ray"],
        "prepare": inside["prepare"],
        "start_workers": max(0.0, loaded - known),
        "load": inside["load"],
        "first step": inside["train"],
    }
    return {**phases, "together": sum(phases.values())}


def show_start(runs: Sequence[dict[str, float]]) -> str:
    """Seconds by phase."""
    rows = [[name, Spread.of([run[name] for run in runs]).show(1)] for name in START_PHASES]
    return table(["phase", "seconds"], rows)
