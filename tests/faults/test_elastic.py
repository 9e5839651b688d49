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
from tests.support import gated, runs
from tests.support.gated import Run, allow
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
