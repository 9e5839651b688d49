"""One rank of two fails on a host of its own: who it was and where is said, and what was learned before is kept."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from finray.tracking.starts import read_starts
from tests.hosts import kills
from tests.support import forks, hosts, lacking, runs, tiny
from tests.support.group import run_group

pytestmark = pytest.mark.nightly

STEPS, EVERY = 8, 2
# A rank's time-out, longer than a busy machine lets a rank wait for a CPU; and how much later the driver may say so,
# which looks every few seconds, counts anew where it had no CPU itself, and then asks the rank for its stack.
HANG_S, SLACK_S = 20, 120


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed) -> Iterator[kills.RayHosts]:
    with forks.server(bed.shared):
        yield kills.RayHosts(bed, workers=2)


@pytest.fixture(scope="module")
def plain(bed: hosts.Bed, cluster: kills.RayHosts, tokenizer: Any) -> runs.Plain:
    """A worker on each of two hosts; Ray itself would start them again many times."""
    tiny.save_model("llama", bed.shared / "model", tokenizer, attention_dropout=0.1)
    rows = tiny.write_chat_rows(bed.shared, 50)
    changes = {
        # One forward pass of each rank in a step.
        **{"train.max_steps": STEPS, "train.micro_batch_size": 2},
        "adapter.dropout": 0.2,
        "checkpoint": {"every_steps": EVERY, "asynchronous": False},
        "cluster": {"address": cluster.address, "num_workers": 2, "max_failures": 20},
    }
    return runs.tiny_run(bed.shared / "model", rows, bed.shared / "unused", changes)


@pytest.fixture(scope="module")
def undisturbed(plain: runs.Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two workers as processes of this machine, without Ray."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_group(plain, run_dir, world_size=2)
    return run_dir


def configured(plain: runs.Plain, output: Path, task: str) -> Path:
    """A config file of a training of a task, in a directory of its own."""
    output.mkdir()
    env = {lacking.MARK: str(output / "mark")}
    changes = {"run.output_dir": str(output), "model.task": task, "cluster.env": env}
    return runs.write_config(runs.changed(plain, changes), output / "run.yaml")


def train(cluster: kills.RayHosts, plain: runs.Plain, output: Path, task: str) -> hosts.Done:
    """Train a task to its end, from the head."""
    cluster.mend()
    return cluster.head.finray("train", configured(plain, output, task), timeout=2 * kills.PATIENCE_S)


def test_a_deterministic_failure_stops_after_two_attempts_with_the_first_error(
    cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed
) -> None:
    """What the other rank says, whose connection breaks, is not the cause."""
    output = bed.shared / "failing"
    done = train(cluster, runs.changed(plain, {"checkpoint.every_steps": 4}), output, lacking.FAILING)
    said = done.out + done.err
    assert done.code == 2, said
    assert "Traceback" not in done.err
    named = re.search(r"failed 2 times from step 0; the first error, of rank 1 on (\w+): LookupError: row 7", said)
    assert named is not None, said
    run_dir = output / "run"
    assert named[1] in {one.name for one in cluster.workers}
    assert named[1] in {one.rpartition(" on ")[2] for start in read_starts(run_dir) for one in start.header.workers[1:]}
    assert said.count("the workers were restarted") == 2
    # What the rank printed before is its log's last lines.
    tail = said[said.index("last output of rank 1:") :]
    assert "looking up row 7" in tail


def test_a_rank_that_sleeps_on_another_host_is_named_with_its_stack_and_the_run_goes_on(
    cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed, undisturbed: Path
) -> None:
    output = bed.shared / "sleeping"
    log, mark = bed.shared / "sleeping.log", output / "mark"
    cluster.mend()
    with log.open("w") as stream:
        config = configured(runs.changed(plain, {"cluster.hang_seconds": HANG_S}), output, lacking.SLEEPING)
        training = cluster.head.start_finray("train", config, stdout=stream, stderr=stream)
        hosts.wait_until(lambda: mark.exists() and mark.read_text(), "a rank sleeps", timeout=kills.PATIENCE_S)
        slept = time.monotonic()
        hosts.wait_until(lambda: "has not reached" in log.read_text(), "it is named", timeout=kills.PATIENCE_S)
        took = time.monotonic() - slept
        assert training.wait(2 * kills.PATIENCE_S) == 0, log.read_text()
    said = " ".join(log.read_text().split())
    # Its time-out is longer where a step took long.
    limit = re.search(r"has not reached the all-reduce of step \d+ for ([\d.]+) s", said)
    assert limit is not None, said
    assert float(limit[1]) >= HANG_S
    assert took < float(limit[1]) + SLACK_S
    run_dir, pid = output / "run", mark.read_text()
    first, *others = read_starts(run_dir)
    (where,) = (one.rpartition(" on ")[2] for one in first.header.workers[1:])
    assert f"rank 1 (pid {pid} on {where}) has not reached the all-reduce of step" in said
    assert "rank 0 (pid" not in said
    # The stack is told where py-spy may look, else it is in the log of the rank.
    assert "asleep" in said + (run_dir / "logs" / "rank-00001.log").read_text()
    assert len(others) == 1
    assert others[0].header.step > 0
    assert runs.trace(run_dir) == runs.trace(undisturbed)


def test_a_rank_that_is_slower_than_the_others_is_named_with_its_host(
    cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed
) -> None:
    output = bed.shared / "slow"
    # Heartbeats come every fifth of the time-out, and each rank is judged by ten steps.
    often = {"train.max_steps": 40, "checkpoint.every_steps": 40, "cluster.hang_seconds": 20}
    done = train(cluster, runs.changed(plain, often), output, lacking.SLOW)
    said = " ".join((done.out + done.err).split())
    assert done.code == 0, said
    (start,) = read_starts(output / "run")
    (where,) = (one.rpartition(" on ")[2] for one in start.header.workers[1:])
    # The machine may have kept the other one waiting as well, at another time.
    slow = re.findall(r"rank (\d) \(pid \d+ on (\w+)\) is slow: its part of a step takes ([\d.]+) s", said)
    assert [(host, float(seconds) > 0.5) for rank, host, seconds in slow if rank == "1"] == [(where, True)]


def test_nan_on_one_rank_stops_all_before_the_update(
    cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed, undisturbed: Path
) -> None:
    """The numbers are read two steps later; until then no update may have changed anything on either host."""
    output = bed.shared / "poisoned"
    rarely = runs.changed(plain, {"tracking.log_every": STEPS, "checkpoint.every_steps": 4})
    done = train(cluster, rarely, output, lacking.POISONED)
    said = done.out + done.err
    assert done.code == 2, said
    step = lacking.POISONED_PASS
    assert f"the loss is nan at step {step}; no weight was changed" in said
    rows = runs.values(undisturbed, "samples")[step - 1]
    named = re.search(r"prepared rows ([\d, \n]+)", said)
    assert named is not None, said
    assert sorted(map(int, re.findall(r"\d+", named[1]))) == sorted(rows)
    for rank in (0, 1):
        # Before each of the eight steps. Those before the bad one show that a change would be seen.
        weights = (output / "mark" / f"weights-{rank}").read_text().split()
        assert len(weights) == STEPS
        assert all(one != other for one, other in pairwise(weights[1:step]))
        assert set(weights[step - 1 :]) == {weights[step - 1]}
    store, name = CheckpointStore(output / "run"), "adapter_model.safetensors"
    assert store.steps() == [4]
    assert (store.path_of(4) / name).read_bytes() == (CheckpointStore(undisturbed).path_of(4) / name).read_bytes()
    assert not (output / "run" / "final").exists()
