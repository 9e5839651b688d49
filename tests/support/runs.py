"""Running tiny fine-tunings in tests: alone in this process, or by `finray train` under Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.parallel.ddp import DDPStrategy
from finray.planning.placement import Placement, device_of
from finray.planning.resolve import packing_of, resolve
from finray.records import Record
from finray.tracking.jsonl import read_records
from finray.training.assemble import Assembled, assemble

# What must not change when a run is disturbed.
COMPARED = ("step", "samples", "loss", "grad_norm", "lr")


def settings(model: Path, rows: Path, output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small run: every step recorded with its samples, checkpoints often, no TensorBoard."""
    base: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(output), "name": "run", "seed": 5},
        "model": {"name": str(model)},
        "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
        "data": {"source": str(rows), "max_length": 64},
        "train": {
            "max_steps": 8,
            "global_batch_size": 4,
            "learning_rate": 0.01,
            "precision": "fp32",
            "warmup_steps": 2,
        },
        "checkpoint": {"every_steps": 4, "keep_last": 10},
        "tracking": {"tensorboard": False, "record_samples": True},
        "cluster": {"cpus_per_worker": 1},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return base


def config_of(plain: dict[str, Any]) -> Config:
    return build_config(plain, source="test")


def resolved_of(config: Config, *, world_size: int = 1) -> Resolved:
    """What the driver would resolve for workers on CPUs of this machine."""
    placement = Placement(world_size, 1, use_gpu=False)
    return resolve(config, placement, device_of(placement), packing=packing_of(config.model))


def assemble_alone(
    plain: dict[str, Any], run_dir: Path, *, notify: Callable[[Record], None] = lambda record: None
) -> Assembled:
    """The loop of a run of one process, without Ray."""
    torch.set_num_threads(1)
    config = config_of(plain)
    run_dir.mkdir(parents=True, exist_ok=True)
    return assemble(
        config,
        resolved_of(config),
        prepared=prepare_here(config),
        run_dir=run_dir,
        strategy=DDPStrategy(torch.device("cpu")),
        notify=notify,
    )


def run_alone(plain: dict[str, Any], run_dir: Path) -> Assembled:
    """Run (or continue) in this process."""
    assembled = assemble_alone(plain, run_dir)
    assembled.loop.run()
    assembled.loop.trackers.finish()
    return assembled


def trace(run_dir: Path) -> list[tuple[Any, ...]]:
    """The per-step record of a run, as it must be reproduced: step, samples, loss, gradient norm, learning rate."""
    records = [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    return [tuple(json.dumps(record[key]) for key in COMPARED) for record in records]


def values(run_dir: Path, key: str) -> list[Any]:
    """One field of every training record."""
    return [record[key] for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "train"]


def write_config(plain: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return path


def start_cli(
    *arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start `finray ...` as a user would; a variable of None is not set."""
    changed = {**os.environ, **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "finray.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in changed.items() if value is not None},
        cwd=cwd,
    )


def cli(*arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run `finray ...` to its end: exit code, standard output, standard error."""
    process = start_cli(*arguments, env=env, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference of all tensors together, relative to the norm of the left ones."""
    assert left.keys() == right.keys()
    distance = sum(float((left[name].double() - right[name].double()).pow(2).sum()) for name in left)
    size = sum(float(left[name].double().pow(2).sum()) for name in left)
    return float((distance / size) ** 0.5)
