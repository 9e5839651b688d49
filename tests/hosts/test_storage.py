"""Runs on hosts that share no disk: all is behind a URL, and between checkpoints in the memory of the other hosts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import manifest
from finray.checkpoint.store import ATTEMPT_FILE
from finray.config.paths import copy_path
from tests.hosts import kills
from tests.support import gated, hosts, runs, s3, tiny
from tests.support.group import run_group

pytestmark = pytest.mark.nightly

STEPS, STORED, IN_MEMORY = 60, 10, 2


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed, hosts_s3: s3.Server) -> kills.RayHosts:
    return kills.RayHosts(bed, workers=3)


@pytest.fixture
def plain(bed: hosts.Bed, hosts_s3: s3.Server, tokenizer: Any) -> runs.Plain:
    """Two workers, stored every tenth step and in memory between; the model alone lies where all hosts see it."""
    tiny.save_model("llama", bed.shared / "model", tokenizer)
    rows = tiny.write_chat_rows(bed.shared, 30)
    changes = {
        **{"run.output_dir": hosts_s3.bucket().url("runs"), "train.max_steps": STEPS, "train.schedule": "constant"},
        **{"checkpoint": {"every_steps": STORED, "in_memory_every": IN_MEMORY, "keep_last": 2}},
        **{"cluster": {"num_workers": 2, "max_failures": 3, "cpus_per_worker": 1}},
    }
    return runs.tiny_run(bed.shared / "model", rows, bed.shared / "unused", changes)


def held(plain: runs.Plain, shared: Path) -> runs.Plain:
    """A run of which no worker does more steps than :func:`gated.allow` lets it, in the directory that hosts share."""
    task, tracker = (f"{kills.__name__}:{one.__name__}" for one in (kills.LimitedLM, kills.Did))
    env = {"LIMIT_FILE": str(shared / "limit")}
    return runs.changed(plain, {"model.task": task, "tracking.trackers": [tracker], "cluster.env": env})


def test_a_host_that_is_lost_costs_little_and_no_disk_is_shared(
    cluster: kills.RayHosts, plain: runs.Plain, tmp_path: Path, bed: hosts.Bed
) -> None:
    head = cluster.head
    config = runs.write_config(held(plain, bed.shared), bed.shared / "run.yaml")
    # The run must not be over before the host is lost.
    gated.allow(bed.shared, STORED + 3)
    words = ("train", config, f"cluster.address={cluster.address}")
    training = hosts.Command(head, *words, log=bed.shared / "train.log")

    def workers_of() -> list[hosts.Host]:
        return [host for host in cluster.workers if host.is_on and _records(host)]

    # Rank 0 writes the records on its host; the other host with a worker is lost.
    (first,) = training.until(workers_of, "records are written")
    training.until(lambda: _steps(first) > STORED + 2, "steps are done")
    workers = json.loads((_records(first)[0].parent / "workers.json").read_text(encoding="utf-8"))
    (lost,) = (bed.hosts[one["host"]] for one in workers if one["host"] != first.name)
    lost.kill()
    done = _steps(first)
    gated.allow(bed.shared, 10**9)
    assert training.wait(420) == 0, training.said()
    assert "from the cluster's memory" in training.said()
    # The steps since the last checkpoint in memory were done again; one may have been recorded later.
    again = re.findall(r"checkpoint of step (\d+) from the cluster's memory", training.said())[0]
    assert done - IN_MEMORY <= int(again) <= done + 1
    url = f"{plain['run']['output_dir']}/run"
    read = "import sys, fsspec; sys.stdout.write(fsspec.open(sys.argv[1], 'rt').open().read())"
    (tmp_path / "stitched").mkdir()
    records = head.check(sys.executable, "-c", read, f"{url}/metrics.jsonl")
    (tmp_path / "stitched" / "metrics.jsonl").write_text(records, encoding="utf-8")

    undisturbed = bed.shared / "undisturbed"
    run_group(runs.changed(plain, {"run.output_dir": str(undisturbed)}), undisturbed / "run", world_size=2)
    assert runs.trace(tmp_path / "stitched") == runs.trace(undisturbed / "run")
    # Any host has it.
    words = ("generate", url, "hello", "--max-new-tokens", 2)
    generate = hosts.Command(head, *words, log=bed.shared / "generate.log")
    assert generate.wait(300) == 0, generate.said()


def test_a_host_that_others_have_lost_and_that_reaches_the_storage_changes_nothing_there(
    cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed, hosts_s3: s3.Server, tmp_path: Path
) -> None:
    """Its worker trains on and uploads its next checkpoint, when another worker has already taken the run over."""
    cluster.mend()
    every, steps, bucket = 6, 30, hosts_s3.bucket()
    plain = runs.changed(
        held(plain, bed.shared),
        {"run.output_dir": bucket.url("runs"), "train.max_steps": steps, "cluster.num_workers": 1},
        {"checkpoint": {"every_steps": every, "in_memory_every": None, "keep_last": 10, "asynchronous": False}},
    )
    gated.allow(bed.shared, every + 2)
    words = ("train", runs.write_config(plain, bed.shared / "lost.yaml"), f"cluster.address={cluster.address}")
    training = hosts.Command(cluster.head, *words, log=bed.shared / "lost.log")
    # Where a host has its copy of the run; it may have those of other tests too.
    folder = copy_path(bucket.url("runs/run")).parent.name

    def tracked(host: hosts.Host) -> list[Path]:
        """The files of this run's tracker there, beside its folder."""
        return list(_local_runs(host).glob(f"{folder}/did-{host.name}-*"))

    def did(host: hosts.Host) -> list[str]:
        return [step for file in tracked(host) for step in file.read_text().split()]

    def at_work(*, beside: Collection[hosts.Host] = ()) -> hosts.Host | None:
        return next((one for one in cluster.workers if one not in beside and str(every + 2) in did(one)), None)

    lost = training.until(at_work, "a worker does its steps")
    (attempt,) = {file.with_name("run").joinpath(ATTEMPT_FILE).read_text() for file in tracked(lost)}
    others = [one for one in (cluster.head, *cluster.workers) if one is not lost]
    lost.cut_from(others)
    training.until(lambda: at_work(beside=[lost]), "another worker takes the run over")
    gated.allow(bed.shared, 10**9)
    assert training.wait(300) == 0, training.said()
    name, due = "runs/run/checkpoint-{:06d}-" + attempt[:8], 2 * every
    # It did the steps up to its next checkpoint, uploaded that, and was told.
    hosts.wait_until(lambda: str(due) in did(lost), "the lost worker does its steps")
    hosts.wait_until(lambda: bucket.keys(name.format(due)), "the lost worker uploads")
    lost.reach(others)
    kills.let_end(lost)
    assert str(due + 1) not in did(lost)
    assert not [key for key in bucket.keys(name.format(due)) if key.endswith(manifest.NAME)]
    index = json.loads(bucket.get("runs/run/checkpoints.json"))["checkpoints"]
    assert [one["step"] for one in index] == [*range(every, steps + 1, every)]
    assert [one["step"] for one in index if one["folder"].endswith(attempt[:8])] == [every]

    (tmp_path / "stitched").mkdir()
    (tmp_path / "stitched" / "metrics.jsonl").write_bytes(bucket.get("runs/run/metrics.jsonl"))
    alone = runs.changed(plain, {"model.task": "causal_lm", "run.output_dir": str(bed.shared / "alone")})
    run_group(runs.changed(alone, {"tracking.trackers": []}), bed.shared / "alone" / "run", world_size=1)
    assert runs.trace(tmp_path / "stitched") == runs.trace(bed.shared / "alone" / "run")
    adapter = "adapter_model.safetensors"
    theirs = bed.shared / "alone" / "run" / f"checkpoint-{steps:06d}" / adapter
    assert bucket.get(f"runs/run/{index[-1]['folder']}/{adapter}") == theirs.read_bytes()


def _local_runs(host: hosts.Host) -> Path:
    return Path(f"/proc/{host.pid}/root/tmp/home/.cache/finray/runs")


def _records(host: hosts.Host) -> list[Path]:
    return list(_local_runs(host).glob("*/run/metrics.jsonl"))


def _steps(host: hosts.Host) -> int:
    return sum(path.read_text(encoding="utf-8").count('"kind": "train"') for path in _records(host))
