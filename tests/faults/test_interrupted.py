"""A rank that is stopped, a head that is killed, a signal from a scheduler: the run continues, or ends in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import forks, gated, runs
from tests.support.gated import Run, allow
from tests.support.group import run_group
from tests.support.runs import Plain

EVERY = 5


def test_a_rank_that_was_stopped_is_named_and_the_workers_start_again(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """Two workers continue to the bits of a run that nobody disturbed."""
    changes = {"train.max_steps": 16, "adapter.dropout": 0.2, "cluster": {"num_workers": 2, "hang_seconds": 20}}
    changes |= {"checkpoint": {"every_steps": EVERY, "keep_last": 3, "asynchronous": False}}
    plain = tiny_run(changes, rows=50, model=dropout_model)
    run_dir = tmp_path / "run"
    allow(tmp_path, 7)
    run = Run(runs.config_of(gated.gated(plain, tmp_path)))
    run.start()
    run.until(lambda: run.steps[-1:] == [7])
    pid = runs.read_workers(run_dir)[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    # The other one continues to the sum of the next step, and waits there.
    allow(tmp_path, 16)
    run.until_said(f"rank 1 (pid {pid}")
    assert run.ended() is None, run.said
    assert any("it is stopped (SIGSTOP)" in one for one in run.said)
    assert [(one.step, one.world_size) for one in run.headers] == [(0, 2), (5, 2)]
    logs = {one.name: one.read_text() for one in (run_dir / "logs").iterdir()}
    assert logs.keys() == {"rank-00000.log", "rank-00001.log", "training.log"}
    for part in ("placement  2 x CPU", "step 16/16  loss", f"rank 1 (pid {pid}", "the run is finished"):
        assert part in logs["training.log"]
    undisturbed = tmp_path / "undisturbed"
    run_group(plain, undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)


@pytest.mark.parametrize("in_memory", [None, 2])
def test_a_run_whose_head_process_is_killed_saves_a_checkpoint(
    tiny_run: Callable[..., Plain], tmp_path: Path, in_memory: int | None
) -> None:
    """With a Ray of its own; a report to Ray would wait for ever, and so would a look at its nodes."""
    kept = {"every_steps": 4, "asynchronous": False, "in_memory_every": in_memory}
    plain = tiny_run({"train.max_steps": 40, "checkpoint": kept}, rows=50)
    output = tmp_path / "out"
    config = runs.write_config(gated.gated(plain, output), tmp_path / "run.yaml")
    allow(output, 6)
    process = runs.start_cli("train", str(config), env={"RAY_ADDRESS": None, "RAY_AUTH_TOKEN": None})
    try:
        runs.wait_for_step(output / "run", 6, process)
        (head,) = [one for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "gcs_server"]
        head.kill()
        # A checkpoint is due before anybody knows.
        allow(output, 10)
        runs.wait_for_step(output / "run", 10, process)
        assert process.stdout is not None
        while "saving a checkpoint" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        allow(output, 40)
        _, err = process.communicate(timeout=runs.PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert "Ray's head process (the GCS) is gone" in err
    last = runs.values(output / "run", "step")[-1]
    assert last > 10
    assert (output / "run" / f"checkpoint-{last:06d}").is_dir()


def test_sigterm_has_the_exit_code_that_a_scheduler_is_given(
    tiny_run: Callable[..., Plain], tmp_path: Path, ray_cluster: str
) -> None:
    plain = tiny_run({"train.max_steps": 40, "cluster.requeue_exit_code": 75}, rows=50)
    config = runs.write_config(gated.gated(plain, tmp_path), tmp_path / "run.yaml")
    allow(tmp_path, 5)
    process = forks.Command("train", config)
    try:
        runs.wait_for_step(tmp_path / "run", 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while "saving a checkpoint" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        allow(tmp_path, 40)
        _, err = process.communicate(timeout=runs.PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, "is saved" in err) == (75, True), err
