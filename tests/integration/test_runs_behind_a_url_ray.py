"""Storage under Ray: a run behind a URL, with two workers, and the commands that come after it, each on a "machine"
without a copy of it; and data behind one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.errors import ConfigError
from finray.runtime import driver
from tests.support import runs, s3, tiny


def test_every_command_finds_a_run_behind_a_url(
    tiny_run: Callable[..., runs.Plain],
    ray_cluster: str,
    bucket: s3.Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, copies = bucket.url("runs/run"), tmp_path / "copies"
    changes = {
        **{
            "run.output_dir": bucket.url("runs"),
            "run.local_dir": str(copies),
            "prepare.local_dir": str(tmp_path / "p"),
        },
        **{"train.max_steps": 4, "checkpoint.every_steps": 2, "cluster.num_workers": 2, "evaluation.every_steps": 2},
        # The evaluator fetches each checkpoint from there.
        **{"data.eval_ratio": 0.2, "evaluation.max_rows": 4, "evaluation.mode": "async"},
    }
    plain = tiny_run(changes, rows=30)
    result = driver.train(runs.config_of(plain))
    assert result.run_dir.is_relative_to(copies)
    there = bucket.keys("runs/run/")
    names = {key.removeprefix("runs/run/").split("/")[0] for key in there}
    assert {"config.yaml", "resolved.json", "metrics.jsonl", "summary.json", "final", "checkpoints.json"} <= names
    assert bucket.get("runs/run/metrics.jsonl") == (result.run_dir / "metrics.jsonl").read_bytes()
    assert [one["step"] for one in runs.records(result.run_dir, "eval")] == [2, 4]
    # Each rank has uploaded what it has written.
    assert {"optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} <= {
        key.rpartition("/")[2] for key in there
    }

    # Another machine: no copy, and the user's cache is empty.
    shutil.rmtree(copies)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, err = runs.finray("generate", url, "hello", "--max-new-tokens", 2, "--json")
    assert code == 0, err
    assert len(json.loads(out)["answers"]) == 1
    code, out, err = runs.finray("evaluate", url, "--max-rows", 2, "--max-new-tokens", 2, "--baseline", "none")
    assert code == 0, err
    assert "runs/run/evaluation/metrics.json" in bucket.keys("runs/run/evaluation")
    code, out, err = runs.finray("export", f"{url}/checkpoint-000002", "--output", tmp_path / "exported")
    assert code == 0, err
    assert (tmp_path / "exported" / "config.json").is_file()
    code, out, err = runs.finray("generate", bucket.url("runs/none"), "hello")
    assert (code, "the run does not exist" in err) == (2, True)

    # And the same command: finished; made longer, it continues.
    again = driver.train(runs.config_of(plain))
    assert (again.summary, again.chosen_step) == (result.summary, result.chosen_step)
    assert (again.final / "adapter_model.safetensors").read_bytes() == bucket.get(
        "runs/run/final/adapter_model.safetensors"
    )
    shutil.rmtree(copies)
    longer = driver.train(runs.config_of(runs.changed(plain, {"train.max_steps": 6, "cluster.num_workers": 1})))
    assert [one["step"] for one in runs.records(longer.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert RemoteStore(tmp_path / "other", Objects(url)).steps()[-1] == 6
    # By the clock of the storage: old unfinished checkpoints are removed.
    assert 0 < Objects(url).age_s("summary.json") < 3600
    with pytest.raises(ConfigError, match="a different configuration"):
        driver.train(runs.config_of(runs.changed(plain, {"train.learning_rate": 0.5})))


def test_training_from_s3_is_training_from_disk(
    tiny_model_dir: Path, tmp_path: Path, bucket: s3.Bucket, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = {"data.eval_ratio": 0.1, "evaluation.every_steps": 4}
    rows = tiny.write_chat_rows(tmp_path, 120)
    local = runs.tiny_run(tiny_model_dir, rows, tmp_path / "local", held_out)
    there = {"prepare.dir": bucket.url("prepared"), "prepare.local_dir": str(tmp_path / "remote" / "fetched")}
    there |= {"run.output_dir": str(tmp_path / "remote"), "data.source": bucket.upload(rows, "rows.jsonl")}
    remote = runs.changed(local, there)
    runs.run_alone(local, tmp_path / "local" / "run")

    config = runs.write_config(remote, tmp_path / "remote.yaml")
    code, out, err = runs.finray("train", config)
    assert code == 0, out + err
    run_dir = tmp_path / "remote" / "run"
    assert runs.trace(run_dir) == runs.trace(tmp_path / "local" / "run")

    # The same data again: Ray is not even started for it, and what was fetched is not fetched again.
    mark = bucket.mark()
    monkeypatch.setattr("finray.runtime.cluster.connected", lambda cluster: pytest.fail("Ray was asked for"))
    code, again, err_2 = runs.finray("prepare", config)
    assert code == 0, again + err_2
    runs.run_alone(remote, tmp_path / "remote" / "second")
    assert runs.trace(tmp_path / "remote" / "second") == runs.trace(run_dir)
    assert bucket.asked("PUT", mark) == []
    assert [key for key in bucket.asked("GET", mark) if key.endswith((".arrow", ".jsonl"))] == []

    written = [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    assert any(path.suffix == ".arrow" for path in written)
    for secret in (s3.SECRET, s3.KEY):
        assert secret in os.environ.values()
        assert secret not in out + err + again + err_2
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
        assert [key for key, content in bucket.content("prepared").items() if secret.encode() in content] == []
