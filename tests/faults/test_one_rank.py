"""One rank of two fails in its own way: the run says who, where and what to change, and none continues alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from finray.records import Note, Record, RunHeader
from finray.runtime import driver, pulses, worker
from finray.runtime.failures import OutOfMemory
from finray.tracking.starts import read_starts
from tests.support import forks, gated, lacking, runs
from tests.support.gated import allow
from tests.support.group import run_group
from tests.support.runs import Plain

# Longer than a busy machine lets a rank wait for a CPU.
HANG_S = 20


def test_a_rank_without_memory_ends_the_run_with_what_it_asked_for_and_the_smallest_change(
    tiny_run: Callable[..., Plain], ray_cluster: str
) -> None:
    """No restart would help, and the change is one that planning finds."""
    plain = tiny_run(
        {
            "model.task": lacking.NO_MEMORY,
            "cluster.num_workers": 2,
            "train": {"max_steps": 8, "micro_batch_size": 2, "gradient_checkpointing": "none"},
        }
    )
    headers: list[Record] = []
    with pytest.raises(OutOfMemory) as caught:
        driver.train(
            runs.config_of(plain), handle=lambda one: headers.append(one) if isinstance(one, RunHeader) else None
        )
    error = caught.value
    assert error.message.startswith("rank 1 on ")
    assert "ran out of memory after step" in error.message
    assert "it asked for 2.00 KiB more, and 1.00 KiB were free" in error.message
    assert error.repair is not None
    assert "the smallest change that should make it fit: train.micro_batch_size=1" in error.repair
    assert error.where == "train.micro_batch_size"
    assert len(headers) == 1


def test_a_rank_that_sleeps_in_a_step_is_named_with_its_stack_and_the_run_goes_on(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """It continues to send its pulse: only that it does not come to the sum gives it away."""
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    plain = tiny_run(
        {
            "model.task": lacking.SLEEPING,
            "run.output_dir": str(tmp_path),
            "train.max_steps": 8,
            "adapter.dropout": 0.2,
            "checkpoint": {"every_steps": 2, "asynchronous": False},
            "cluster": {"num_workers": 2, "hang_seconds": HANG_S, "env": {lacking.MARK: str(mark)}},
        },
        rows=50,
        model=dropout_model,
    )
    said: list[Note] = []
    driver.train(runs.config_of(plain), handle=lambda one: said.append(one) if isinstance(one, Note) else None)
    pid = mark.read_text()
    warnings = [one.message for one in said if one.level == "warning" and f"rank 1 (pid {pid} on" in one.message]
    assert "has not reached the all-reduce of step" in warnings[0]
    assert "cluster.hang_seconds" in warnings[0]
    assert not any("rank 0 (pid" in one.message for one in said)
    # The stack is told where py-spy may look, else it is in the log of the rank.
    assert "asleep" in warnings[1] + (run_dir / "logs" / "rank-00001.log").read_text()
    undisturbed = tmp_path / "undisturbed"
    run_group(runs.changed(plain, {"model.task": "causal_lm"}), undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)


@pytest.mark.nightly
def test_a_worker_that_hangs_before_it_reports_is_named_with_its_stack_and_the_run_goes_on(
    tiny_run: Callable[..., Plain], tmp_path: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "train_worker", lacking.hanging_worker)
    # What stops a start is the time that stops a rank.
    monkeypatch.setattr(pulses, "_FIRST", 1.0)
    mark = tmp_path / "mark"
    cluster = {"num_workers": 1, "hang_seconds": HANG_S, "env": {lacking.MARK: str(mark)}}
    plain = tiny_run({"train.max_steps": 1, "cluster": cluster})
    said: list[Note] = []
    hung = pulses.Pulses.hung

    def hung_in_time(self: pulses.Pulses, now: float) -> pulses.Hang | None:
        # The worker has the time that it needs until it hangs, and so has the next one, which does not.
        has_hung = any("has not reported since" in one.message for one in said)
        monkeypatch.setattr(pulses, "START_S", 0.0 if mark.exists() and not has_hung else runs.PATIENCE_S)
        return hung(self, now)

    monkeypatch.setattr(pulses.Pulses, "hung", hung_in_time)
    done = driver.train(runs.config_of(plain), handle=lambda one: said.append(one) if isinstance(one, Note) else None)
    assert done.summary.step == 1
    who = f"a worker (pid {mark.read_text()} on "
    warnings = [one.message for one in said if one.level == "warning" and one.message.startswith(who)]
    assert f"has not reported since it started {HANG_S} s ago" in warnings[0]
    # Only where py-spy may look.
    assert "asleep" in warnings[1] or "it is sleeping" in warnings[1]


@pytest.mark.nightly
def test_a_rank_that_was_stopped_is_named_and_the_workers_start_again(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """Two workers continue to the bits of a run that nobody disturbed."""
    changes = {"train.max_steps": 16, "adapter.dropout": 0.2, "cluster": {"num_workers": 2, "hang_seconds": HANG_S}}
    changes |= {"checkpoint": {"every_steps": 5, "keep_last": 3, "asynchronous": False}}
    plain = tiny_run(changes, rows=50, model=dropout_model)
    run_dir = tmp_path / "run"
    allow(tmp_path, 7)
    process = forks.Command("train", runs.into(gated.gated(plain, tmp_path), tmp_path))
    runs.wait_for_step(run_dir, 7, process)
    pid = runs.read_workers(run_dir)[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    # The other one continues to the sum of the next step, and waits there.
    allow(tmp_path, 16)
    out, err = process.communicate(timeout=runs.PATIENCE_S)
    assert process.returncode == 0, out + err
    assert f"rank 1 (pid {pid}" in out + err
    assert "it is stopped (SIGSTOP)" in " ".join((out + err).split())
    assert [(one.header.step, one.header.world_size) for one in read_starts(run_dir)] == [(0, 2), (5, 2)]
    logs = {one.name: one.read_text() for one in (run_dir / "logs").iterdir()}
    assert logs.keys() == {"rank-00000.log", "rank-00001.log", "training.log"}
    for part in ("placement  2 x CPU", "step 16/16  loss", f"rank 1 (pid {pid}", "the run is finished"):
        assert part in logs["training.log"]
    undisturbed = tmp_path / "undisturbed"
    run_group(plain, undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)
