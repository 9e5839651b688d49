"""The number of workers follows a cluster's nodes, and the run sees the same rows in the same steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from finray.tracking.starts import read_starts
from tests.faults.test_kill import wait_for_step
from tests.support import gated, runs
from tests.support.gated import Run, allow
from tests.support.group import run_group
from tests.support.runs import Plain

STEPS, EVERY = 40, 5


@contextmanager
def joined(address: str, folder: Path, *, cpus: int) -> Iterator[psutil.Process]:
    """A second node of a cluster, on this machine; the process of its raylet."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", f"--num-cpus={cpus}"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    with (folder / "node.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    family = psutil.Process(process.pid)
    try:
        raylet = None
        deadline = time.monotonic() + gated.PATIENCE_S
        while raylet is None:
            assert process.poll() is None, (folder / "node.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
            raylet = next((one for one in family.children(recursive=True) if one.name() == "raylet"), None)
        yield raylet
    finally:
        with suppress(psutil.Error):
            rest = family.children(recursive=True)
            for one in [*rest, family]:
                with suppress(psutil.Error):
                    one.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_workers_join_and_leave_with_their_nodes(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """One worker, then two, then one: each step has the rows that it has in a run of one worker."""
    changes = {"train.max_steps": STEPS, "adapter.dropout": 0.2}
    changes |= {"checkpoint": {"every_steps": EVERY, "keep_last": 3, "asynchronous": False}}
    workers = {"num_workers": {"min": 1, "max": 2}, "cpus_per_worker": 3, "resize_seconds": 0.5}
    plain = tiny_run(changes | {"cluster": workers}, rows=50, model=dropout_model)
    run_dir = tmp_path / "run"
    allow(tmp_path, 6)
    run = Run(runs.config_of(gated.gated(plain, tmp_path)))
    run.start()
    run.until(lambda: run.steps[-1:] == [6])
    with joined(ray_cluster, tmp_path, cpus=3) as raylet:
        run.until_said("there is room for 2 workers")
        limit = 6
        while len(run.headers) < 2:
            # It may not be heard of before the next step begins.
            limit += 1
            allow(tmp_path, limit)
            run.until(lambda limit=limit: run.steps[-1] == limit or len(run.headers) == 2)  # type: ignore[misc]
        grown = run.headers[1].step
        # It saved a checkpoint before it made place: no step was done twice.
        assert run.steps == list(range(1, grown + 1))
        limit = grown + EVERY + 2
        allow(tmp_path, limit)
        run.until(lambda: run.steps[-1] == limit)
        assert len(runs.read_workers(run_dir)) == 2
        assert json.loads((run_dir / "resolved.json").read_text())["world_size"] == 2
        raylet.kill()
        run.until(lambda: len(run.headers) == 3)
        allow(tmp_path, STEPS)
        assert run.ended() is None, run.said
    assert [one.world_size for one in run.headers] == [1, 2, 1]
    starts = [one.header for one in read_starts(run_dir)]
    assert [(one.step, one.world_size) for one in starts] == [(one.step, one.world_size) for one in run.headers]
    # What is done again are the steps since the last checkpoint.
    assert limit - EVERY <= run.headers[2].step <= limit
    undisturbed = tmp_path / "undisturbed"
    runs.run_alone(runs.changed(plain, {"cluster.num_workers": 1}), undisturbed)
    assert runs.values(run_dir, "samples") == runs.values(undisturbed, "samples")
    runs.assert_same_curve(run_dir, undisturbed, rel=1e-4)


def test_a_rank_that_was_stopped_is_named_and_the_workers_start_again(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """Two workers go on to the bits of a run that nobody disturbed."""
    changes = {"train.max_steps": 16, "adapter.dropout": 0.2, "cluster": {"num_workers": 2, "hang_seconds": 6}}
    changes |= {"checkpoint": {"every_steps": EVERY, "keep_last": 3, "asynchronous": False}}
    plain = tiny_run(changes, rows=50, model=dropout_model)
    run_dir = tmp_path / "run"
    allow(tmp_path, 7)
    run = Run(runs.config_of(gated.gated(plain, tmp_path)))
    run.start()
    run.until(lambda: run.steps[-1:] == [7])
    pid = runs.read_workers(run_dir)[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    # The other one goes on to the sum of the next step, and waits there.
    allow(tmp_path, 16)
    run.until_said(f"rank 1 (pid {pid}")
    assert run.ended() is None, run.said
    assert any("it is stopped (SIGSTOP)" in one for one in run.said)
    assert [(one.step, one.world_size) for one in run.headers] == [(0, 2), (5, 2)]
    assert {one.name for one in (run_dir / "logs").iterdir()} == {"rank-00000.log", "rank-00001.log"}
    undisturbed = tmp_path / "undisturbed"
    run_group(plain, undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)


def test_a_run_whose_head_process_is_killed_saves_a_checkpoint(tiny_run: Callable[..., Plain], tmp_path: Path) -> None:
    """With a Ray of its own; a report to Ray would wait for ever."""
    plain = tiny_run({"train.max_steps": 40, "checkpoint": {"every_steps": 4, "asynchronous": False}}, rows=50)
    output = tmp_path / "out"
    config = runs.write_config(gated.gated(plain, output), tmp_path / "run.yaml")
    allow(output, 6)
    process = runs.start_cli("train", str(config), env={"RAY_ADDRESS": None, "RAY_AUTH_TOKEN": None})
    try:
        wait_for_step(output / "run", 6, process)
        (head,) = [one for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "gcs_server"]
        head.kill()
        # A checkpoint is due before anybody knows.
        allow(output, 10)
        wait_for_step(output / "run", 10, process)
        assert process.stdout is not None
        while "saving a checkpoint" not in (line := process.stdout.readline()):
            assert line, "it ended"
        allow(output, 40)
        _, err = process.communicate(timeout=gated.PATIENCE_S)
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
    process = runs.start_cli("train", str(config))
    try:
        wait_for_step(tmp_path / "run", 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while "saving a checkpoint" not in (line := process.stdout.readline()):
            assert line, "it ended"
        allow(tmp_path, 40)
        _, err = process.communicate(timeout=gated.PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, "is saved" in err) == (75, True), err
