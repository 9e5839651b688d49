"""Running tiny fine-tunings in tests: alone in this process, or by `finray train` under Ray."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from finray.cli.main import main
from finray.config.load import build_config
from finray.config.resolved import PreparedRun, Resolved
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.data.dataset.labels import find_labels
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.run_data import decide_steps
from finray.models.packing_cache import packing_of
from finray.parallel.ddp import DDPStrategy
from finray.planning.placement import Placement, device_of
from finray.planning.resolve import resolve
from finray.records import Record
from finray.tracking.jsonl import read_records
from finray.training.assemble import Assembled, assemble
from tests.support import forks

# A config as its YAML file has it.
Plain = dict[str, Any]
# What must not change when a run is disturbed.
COMPARED = ("step", "samples", "loss", "grad_norm", "lr", "epoch", "tokens", "supervised")
# How long a test waits where a command or a worker starts, on a machine that others keep busy.
PATIENCE_S = 500.0
# Where runs without Ray are trained: `make test-gpu` has them on a GPU, which all processes of a group share.
DEVICE = torch.device(os.environ.get("FINRAY_TEST_DEVICE", "cpu"))


def tiny_run(model: Path, rows: Path | str, output: Path, changes: Mapping[str, Any] | None = None) -> Plain:
    """A small run: every step recorded with its samples, checkpoints often, no TensorBoard, no evaluation at the start.

    Args:
        model: directory of the model.
        rows: the data source.
        output: ``run.output_dir``.
        changes: as for :func:`changed`.
    """
    plain: Plain = {
        "run": {"output_dir": str(output), "name": "run", "seed": 5},
        "model": {"name": str(model)},
        "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
        "data": {"source": str(rows), "max_length": 64},
        "train": {
            **{"max_steps": 8, "warmup_steps": 2, "learning_rate": 0.01},
            **{"global_batch_size": 4, "precision": "fp32"},
        },
        "checkpoint": {"every_steps": 4, "keep_last": 10},
        "evaluation": {"on_start": False},
        "tracking": {"tensorboard": False, "record_samples": True, "system_every_seconds": None},
        "cluster": {"cpus_per_worker": 1},
    }
    return changed(plain, changes or {})


def changed(plain: Plain, *changes: Mapping[str, Any]) -> Plain:
    """A copy with other values: ``{"train.max_steps": 2}`` and ``{"train": {"max_steps": 2}}`` set the same field."""
    plain = copy.deepcopy(plain)
    for path, value in (item for one in changes for item in one.items()):
        *sections, field = path.split(".")
        place = plain
        for section in sections:
            place = place.setdefault(section, {})
        is_section = isinstance(value, Mapping) and isinstance(place.get(field), Mapping)
        place[field] = changed(place[field], value) if is_section else copy.deepcopy(value)
    return plain


def config_of(plain: Plain) -> Config:
    return build_config(plain, source="test")


def resolved_of(config: Config, *, world_size: int = 1, device: torch.device = DEVICE) -> Resolved:
    """What the driver would resolve for workers on CPUs of this machine, or on its GPU."""
    placement = Placement(world_size, 1, use_gpu=device.type == "cuda", gpus_per_worker=1 / world_size)
    execution = resolve(config, placement, device_of(placement), packing=packing_of(config.model))
    steps = decide_steps(config.train, packs=None)
    if not task_spec(config.model.task).reads_labels:
        return Resolved.of(execution, steps)
    dataset = PreparedDataset(prepare_here(config))
    found = find_labels(dataset, dataset.splits(config.data, seed=config.run.seed), config)
    assert found.labels is not None
    assert not found.problems
    return Resolved.of(execution, steps, found.labels, found.weights)


def assemble_alone(
    plain: Plain,
    run_dir: Path,
    *,
    notify: Callable[[Record], None] = lambda record: None,
    device: torch.device = DEVICE,
    **options: Any,
) -> Assembled:
    """The loop of a run of one process, without Ray."""
    torch.set_num_threads(1)
    config = config_of(plain)
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = resolved_of(config, device=device)
    return assemble(
        config,
        resolved,
        prepared=PreparedRun(prepare_here(config), resolved),
        run_dir=run_dir,
        strategy=DDPStrategy(device),
        notify=notify,
        **options,
    )


def run_alone(plain: Plain, run_dir: Path, **options: Any) -> Assembled:
    """Run (or continue) in this process; options are those of :func:`assemble_alone` and :func:`assemble`."""
    assembled = assemble_alone(plain, run_dir, **options)
    assembled.loop.run()
    assembled.loop.trackers.finish(patience_s=PATIENCE_S)
    return assembled


def records(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == kind]


def values(run_dir: Path, key: str) -> list[Any]:
    """One field of every training record."""
    return [record[key] for record in records(run_dir)]


def kill(pid: int) -> None:
    """SIGKILL, where the process is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def read_workers(run_dir: Path) -> list[dict[str, Any]]:
    """Host and process id of each worker, by rank."""
    workers: list[dict[str, Any]] = json.loads((run_dir / "workers.json").read_text(encoding="utf-8"))
    return workers


def trace(run_dir: Path) -> list[tuple[str, ...]]:
    """The per-step record of a run, as it must be reproduced."""
    return [tuple(json.dumps(record[key]) for key in COMPARED) for record in records(run_dir)]


def assert_same_curve(left: Path, right: Path, *, rel: float = 1e-4) -> None:
    for key in ("loss", "grad_norm"):
        assert values(left, key) == pytest.approx(values(right, key), rel=rel), (left, key)
    assert values(left, "samples") == values(right, "samples")


def keep_until(run_dir: Path, step: int) -> Path:
    """Forget later checkpoints, as if the run had been killed before them."""
    for path in run_dir.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    assert (run_dir / f"checkpoint-{step:06d}").is_dir()
    return run_dir


def reopen(run_dir: Path, *, step: int) -> None:
    """A finished run as it was after a step."""
    keep_until(run_dir, step)
    shutil.rmtree(run_dir / "final")
    (run_dir / "summary.json").unlink()


def cut(run_dir: Path, target: Path, *, step: int = 4) -> Path:
    """A copy of a run as it was after a step."""
    return keep_until(Path(shutil.copytree(run_dir, target)), step)


def write_config(plain: Plain, path: Path) -> Path:
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return path


def into(plain: Plain, output: Path, *changes: dict[str, Any]) -> Path:
    """The file of the config, with an output directory of its own."""
    return write_config(changed(plain, {"run.output_dir": str(output)}, *changes), output / "run.yaml")


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | forks.Command | None = None) -> None:
    """Return as soon as something is so, while a process is at work."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A directory whose path is short: that of a socket has a limit."""
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str] | forks.Command) -> None:
    """Return as soon as the record shows the step."""
    wait_until(lambda: any(done >= step for done in values(run_dir, "step")), process)


def wait_for_no_group() -> None:
    """Return when no placement group keeps CPUs of the cluster; a killed driver's are removed a little later."""
    import ray
    from ray.util import placement_group_table

    # Asked without a connection, Ray would wait for one, where no signal and no limit of time reaches it.
    if not ray.is_initialized():
        return
    wait_until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))


def finray(*arguments: object) -> tuple[int, str, str]:
    """Run `finray ...` in this process, several seconds faster than :func:`cli`, which is for tests of what only a
    process of its own shows: exit code, standard output, standard error."""
    words = ["finray", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, COLUMNS="200"),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        pytest.raises(SystemExit) as exit_,
    ):
        main()
    return int(exit_.value.code or 0), out.getvalue(), err.getvalue()


def start_cli(
    *arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start `finray ...` as a user would; a variable of None is not set."""
    changed = {**os.environ, **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "finray", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in changed.items() if value is not None},
        cwd=cwd,
    )


def cli(*arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run `finray ...` to its end: exit code, standard output, standard error."""
    process = start_cli(*arguments, env=env, cwd=cwd)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def files_with(folder: Path, content: bytes) -> list[Path]:
    """Files below a directory that hold this; processes may still remove some."""
    found = []
    for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):
            if path.is_file() and content in path.read_bytes():
                found.append(path)
    return found


def flip(file: Path, position: int | None = None) -> None:
    """Change one byte, in the middle or where it is said."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference of all tensors together, relative to the norm of the left ones."""
    assert left.keys() == right.keys()
    distance = sum(float((left[name].double() - right[name].double()).pow(2).sum()) for name in left)
    size = sum(float(left[name].double().pow(2).sum()) for name in left)
    return float((distance / size) ** 0.5)
