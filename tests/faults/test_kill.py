"""The kill test: workers and drivers die by SIGKILL at random steps, and the run's record does not change by a bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs, tiny

STEPS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model("llama", folder, tiny.train_tokenizer(), attention_dropout=0.1)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    """Two workers with dropout on, accumulating over two micro-batches."""
    folder = tmp_path_factory.mktemp("data")
    rows = tiny.write_chat_rows(folder, 50)
    return runs.settings(
        model,
        rows,
        folder,
        adapter={"rank": 4, "dropout": 0.2},
        train={"max_steps": STEPS, "global_batch_size": 4, "learning_rate": 0.01, "precision": "fp32"},
        checkpoint={"every_steps": 7, "keep_last": 2},
        cluster={"num_workers": 2, "cpus_per_worker": 1, "max_failures": 5},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, plain: dict[str, Any], ray_cluster: str) -> Path:
    return finished(plain, tmp_path_factory.mktemp("undisturbed"))


def finished(plain: dict[str, Any], output: Path) -> Path:
    config = runs.write_config({**plain, "run": {**plain["run"], "output_dir": str(output)}}, output / "run.yaml")
    code, out, err = runs.cli("train", str(config))
    assert code == 0, out + err
    return output / "run"


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return as soon as the record shows the step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(done >= step for done in runs.values(run_dir, "step")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def kill_worker(run_dir: Path, rank: int) -> None:
    workers = json.loads((run_dir / "workers.json").read_text(encoding="utf-8"))
    os.kill(workers[rank]["pid"], signal.SIGKILL)


def test_workers_killed_at_random_steps(plain: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    config = runs.write_config({**plain, "run": {**plain["run"], "output_dir": str(tmp_path)}}, tmp_path / "run.yaml")
    process = runs.start_cli("train", str(config))
    run_dir = tmp_path / "run"
    targets = sorted(chance.sample(range(8, STEPS - 12), 2))
    for number, step in enumerate(targets):
        wait_for_step(run_dir, step, process)
        before = (run_dir / "workers.json").read_text(encoding="utf-8")
        kill_worker(run_dir, rank=number % 2)
        deadline = time.monotonic() + 120
        while (run_dir / "workers.json").read_text(encoding="utf-8") == before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "Ray did not restart the workers"
            time.sleep(0.02)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert out.count("the workers were restarted") == 2
    assert runs.trace(run_dir) == runs.trace(undisturbed)
    assert same_result(run_dir, undisturbed)


def test_the_driver_killed_and_the_same_command_again(plain: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(2)
    config = runs.write_config({**plain, "run": {**plain["run"], "output_dir": str(tmp_path)}}, tmp_path / "run.yaml")
    run_dir = tmp_path / "run"
    process = runs.start_cli("train", str(config))
    wait_for_step(run_dir, chance.randrange(15, STEPS - 15), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, out, err = runs.cli("train", str(config))
    assert code == 0, out + err
    assert "resuming   at step" in out
    assert runs.trace(run_dir) == runs.trace(undisturbed)
    assert same_result(run_dir, undisturbed)


def same_result(left: Path, right: Path) -> bool:
    name = Path("final") / "adapter_model.safetensors"
    return (left / name).read_bytes() == (right / name).read_bytes()


def test_a_run_that_keeps_failing_ends_with_the_workers_error(
    plain: dict[str, Any],
    tmp_path: Path,
    ray_cluster: str,
    monkeypatch: pytest.MonkeyPatch,
    write_rows: Callable[..., Path],
) -> None:
    """No restart helps against a learning rate that makes the loss infinite: one message, no retries."""
    diverging = {
        **plain,
        "run": {**plain["run"], "output_dir": str(tmp_path)},
        "train": {**plain["train"], "learning_rate": 1e30, "warmup_steps": 0, "max_grad_norm": None},
    }
    code, out, err = runs.cli("train", str(runs.write_config(diverging, tmp_path / "run.yaml")))
    assert code == 2
    assert "no weight was changed" in err
    assert "Traceback" not in out + err
    assert "the workers were restarted" not in out


def test_a_bug_is_not_retried_for_ever(plain: dict[str, Any], tmp_path: Path, ray_cluster: str) -> None:
    """A model whose forward always raises: two attempts, then its own error, though Ray might restart five times."""
    broken = tmp_path / "model"
    # Positions outside the table raise in the embedding, in the first step of every attempt.
    tiny.save_model("gpt2", broken, tiny.train_tokenizer(), n_positions=4)
    config = {
        **plain,
        "run": {**plain["run"], "output_dir": str(tmp_path)},
        "model": {"name": str(broken)},
        "cluster": {**plain["cluster"], "num_workers": 1},
    }
    code, out, err = runs.cli("train", str(runs.write_config(config, tmp_path / "run.yaml")))
    assert code == 2
    assert "2 times in the same way from step 0: IndexError" in err
    assert out.count("the workers were restarted") == 2
