"""One config over three hosts, on a shared disk and on S3 without one; what is left of a run holds no secret."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from finray.data.sampling.collate import Batch
from finray.tasks.causal_lm import CausalLM
from finray.tracking.starts import read_starts
from tests.hosts import kills
from tests.support import forks, hosts, runs, s3, tiny

pytestmark = pytest.mark.nightly

OWN_MODEL = "/tmp/model"
SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "MLFLOW_TRACKING_PASSWORD": "hunter2-planted"}


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed, hosts_s3: s3.Server) -> Iterator[kills.RayHosts]:
    with forks.server(bed.shared):
        yield kills.RayHosts(bed, workers=3, cpus=2)


@pytest.fixture(scope="module")
def plain(bed: hosts.Bed, cluster: kills.RayHosts, tokenizer: object) -> runs.Plain:
    """Four steps of one worker on each host."""
    tiny.save_model("llama", bed.shared / "model", tokenizer)
    rows = tiny.write_chat_rows(bed.shared, 24)
    changes = {"train.max_steps": 4, "train.global_batch_size": 6, "checkpoint.every_steps": 2}
    placed = {"cluster.address": cluster.address, "cluster.num_workers": 3, "cluster.cpus_per_worker": 2}
    return runs.tiny_run(bed.shared / "model", rows, bed.shared / "unused", changes | placed)


@pytest.fixture(scope="module")
def alone(plain: runs.Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    runs.run_alone(plain, run_dir)
    return run_dir


def require_no_secret(cluster: kills.RayHosts, bed: hosts.Bed, bucket: s3.Bucket, said: str) -> None:
    """On all hosts, in logs of Ray too; on storage; in what the command said. (Job files: tests/unit/jobspec.)"""
    for secret in (*SECRETS.values(), s3.SECRET, cluster.token):
        assert secret not in said
        assert not [name for name, content in bucket.content().items() if secret.encode() in content]
        for host in (cluster.head, *cluster.workers):
            # Below /tmp the checkout may lie, too, which has them in its tests.
            found = host.run("grep", "-rlF", "--", secret, "/tmp/ray", hosts.HOME, bed.shared).out
            assert found == "", f"{secret[:4]}... on {host.name}"


@pytest.fixture
def unshared(cluster: kills.RayHosts, plain: runs.Plain, bed: hosts.Bed, hosts_s3: s3.Server) -> runs.Plain:
    """The same with the rows behind a URL, and a model that each host has to itself, in its own `/tmp`."""
    # A host that is turned on again has lost it.
    cluster.mend()
    for host in (cluster.head, *cluster.workers):
        host.check("cp", "-rT", bed.shared / "model", OWN_MODEL)
    rows = hosts_s3.bucket().upload(Path(plain["data"]["source"]), "rows.jsonl")
    return runs.changed(plain, {"model.name": OWN_MODEL, "data.source": rows})


@pytest.mark.parametrize("strategy", kills.STRATEGIES)
def test_three_hosts_have_the_curve_of_one_machine(
    cluster: kills.RayHosts,
    bed: hosts.Bed,
    hosts_s3: s3.Server,
    unshared: runs.Plain,
    alone: Path,
    strategy: str,
    tmp_path: Path,
) -> None:
    """With S3, and nothing else that the hosts share. (On a shared disk: test_kills.)"""
    bucket = hosts_s3.bucket()
    changed = runs.changed(unshared, kills.STRATEGIES[strategy], {"run.output_dir": bucket.url("runs")})
    assert str(bed.shared) not in yaml.safe_dump(changed)
    cluster.head.write("/tmp/run.yaml", yaml.safe_dump(changed).encode())
    train = hosts.Command(cluster.head, "train", "/tmp/run.yaml", log=tmp_path / "train.log", env=SECRETS)
    assert train.wait(500) == 0, train.said()
    run_dir = tmp_path / "from-s3"
    run_dir.mkdir()
    for name in ("metrics.jsonl", "starts.jsonl"):
        (run_dir / name).write_bytes(bucket.get(f"runs/run/{name}"))
    ranks = read_starts(run_dir)[-1].header.workers
    assert sorted(one.rpartition(" on ")[2] for one in ranks) == ["h2", "h3", "h4"]
    runs.assert_same_curve(run_dir, alone, rel=1e-5)
    require_no_secret(cluster, bed, bucket, train.said())


def test_ranks_of_one_host_follow_each_other_so_that_shards_stay_within_it(
    cluster: kills.RayHosts, bed: hosts.Bed, plain: runs.Plain, alone: Path
) -> None:
    """Two hosts with two workers each, and the weights sharded over two ranks: only gradients go between hosts."""
    changes = {"cluster.num_workers": 4, "cluster.cpus_per_worker": 1, "parallel.shard_size": 2}
    changed = runs.changed(plain, kills.STRATEGIES["FSDP2"], changes, {"run.output_dir": str(bed.shared / "hybrid")})
    cluster.mend()
    done = cluster.head.finray("train", runs.write_config(changed, bed.shared / "hybrid.yaml"), timeout=500)
    assert done.code == 0, done.out + done.err
    run_dir = bed.shared / "hybrid" / "run"
    workers = runs.read_workers(run_dir)
    assert [one["rank"] for one in workers] == [0, 1, 2, 3]
    assert [(one["node_rank"], one["local_rank"]) for one in workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, _, second, _ = (one["host"] for one in workers)
    assert first != second
    assert [one["host"] for one in workers] == [first, first, second, second]
    assert [one.rpartition(" on ")[2] for one in read_starts(run_dir)[-1].header.workers] == [
        *(first,) * 2,
        *(second,) * 2,
    ]
    runs.assert_same_curve(run_dir, alone, rel=1e-5)


class Crashing(CausalLM):
    """Fails as the client of a service does that says whom it asked how."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Fail."""
        password, token = os.environ["MLFLOW_TRACKING_PASSWORD"], os.environ["HF_TOKEN"]
        raise RuntimeError(f"401 for https://me:{password}@host, {token}")


def test_no_secret_is_in_anything_that_is_left_of_a_crash(
    cluster: kills.RayHosts, bed: hosts.Bed, hosts_s3: s3.Server, plain: runs.Plain, tmp_path: Path
) -> None:
    cluster.mend()
    bucket = hosts_s3.bucket()
    changes: runs.Plain = {"run.output_dir": bucket.url("runs"), "cluster.num_workers": 1, "cluster.max_failures": 0}
    changes["model.task"] = f"{__name__}:{Crashing.__name__}"
    config = runs.write_config(runs.changed(plain, changes), bed.shared / "crash.yaml")
    train = hosts.Command(cluster.head, "train", config, log=tmp_path / "train.log", env=SECRETS)
    assert train.wait(500) == 2, train.said()
    assert "401 for" in train.said()
    require_no_secret(cluster, bed, bucket, train.said())
