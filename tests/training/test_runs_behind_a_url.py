"""Runs whose directory is behind a URL, against a server that speaks S3: trained, killed, continued elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from finray.checkpoint import manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import INDEX, RemoteStore
from finray.checkpoint.rundir import check_output
from finray.config.paths import with_absolute_paths
from finray.errors import CheckpointError, StorageError
from tests.support import faulty_s3, recorded, runs, s3, tiny

Plain = runs.Plain


def small(model: Path, folder: Path, output_dir: str) -> Plain:
    """A run of six steps with a checkpoint every two."""
    changes = {"train.max_steps": 6, "checkpoint.every_steps": 2, "prepare.dir": str(folder / "prepared")}
    rows = tiny.write_chat_rows(folder, 24)
    return runs.tiny_run(model, rows, folder / "unused", {"run.output_dir": output_dir, **changes})


@pytest.fixture
def tiny_on_s3(tiny_model_dir: Path, tmp_path: Path, bucket: s3.Bucket) -> Plain:
    return small(tiny_model_dir, tmp_path, bucket.url("runs"))


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a local directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runs.run_alone(small(tiny_model_dir, folder, str(folder)), folder / "run")
    return folder / "run"


@pytest.fixture
def faulty(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[faulty_s3.Faulty]:
    """What a test reaches instead of the server."""
    with faulty_s3.before(s3_server.endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


class Killed(Exception):
    """Stands for a kill."""


def killed_after(plain: Plain, run_dir: Path, step: int) -> None:
    """Train, and end without a word when the checkpoint of a step has become one."""

    def reported(path: Path, metrics: dict[str, float]) -> None:
        if metrics["step"] == step:
            raise Killed

    with pytest.raises(Killed):
        runs.run_alone(plain, run_dir, reported=reported)


def test_a_killed_run_goes_on_in_another_directory_as_if_nothing_had_been(
    tiny_on_s3: Plain, undisturbed: Path, tmp_path: Path, bucket: s3.Bucket
) -> None:
    killed_after(tiny_on_s3, tmp_path / "first", 4)
    shutil.rmtree(tmp_path / "first")
    runs.run_alone(tiny_on_s3, tmp_path / "second").loop.writer.sync_records()
    assert runs.trace(tmp_path / "second") == runs.trace(undisturbed)
    whole = manifest.read(undisturbed / "checkpoint-000006")
    copy = tmp_path / "third"
    store = RemoteStore(copy, Objects(bucket.url("runs/run")))
    assert store.steps() == [2, 4, 6]
    # Of what the clock is written into, the bytes differ.
    same = {one["path"]: one["sha256"] for one in whole["files"] if one["path"] != "training_state/state.json"}
    assert same == {
        one["path"]: one["sha256"] for one in store.verify(6)["files"] if one["path"] != "training_state/state.json"
    }
    assert (copy / "checkpoint-000006" / "adapter_model.safetensors").is_file()
    assert bucket.get("runs/run/metrics.jsonl") == (tmp_path / "second" / "metrics.jsonl").read_bytes()


def test_a_run_that_is_killed_before_its_first_checkpoint_is_the_same_run_to_trackers(
    tiny_on_s3: Plain, tmp_path: Path, bucket: s3.Bucket
) -> None:
    """What a start finds behind the URL replaces what lies here."""
    runs.assemble_alone(tiny_on_s3, tmp_path / "run")
    first = (tmp_path / "run" / "run_id").read_text()
    assert bucket.get("runs/run/run_id").decode() == first
    for folder in ("run", "elsewhere"):
        runs.assemble_alone(tiny_on_s3, tmp_path / folder)
        assert (tmp_path / folder / "run_id").read_text() == first


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_said_before_anything_else(tiny_on_s3: Plain, s3_server: s3.Server) -> None:
    for url, said in (("s3://finray-tests-of-nobody/runs", "cannot write there"), ("nfs4://x/y", "cannot be used")):
        config = with_absolute_paths(runs.config_of(runs.changed(tiny_on_s3, {"run.output_dir": url})))
        with pytest.raises(StorageError, match=said) as caught:
            check_output(config)
        assert caught.value.repair


# --- storage on a bad day -------------------------------------------------------------------------------------------


def test_old_listings_hide_nothing_and_show_nothing_that_is_gone(
    tiny_on_s3: Plain, tmp_path: Path, bucket: s3.Bucket, faulty: faulty_s3.Faulty
) -> None:
    url = bucket.url("runs/run")
    faulty.fault = lambda request: "late" if request.lists else ""
    # The first answer: there is nothing.
    assert RemoteStore(tmp_path / "empty", Objects(url)).steps() == []
    killed_after(tiny_on_s3, tmp_path / "run", 4)
    assert not any(one.startswith("checkpoint-") for one in Objects(url).folders())
    assert RemoteStore(tmp_path / "other", Objects(url)).steps() == [2, 4]
    faulty.listings.clear()
    listed = Objects(url).folders()
    runs.run_alone(runs.changed(tiny_on_s3, {"checkpoint.keep_last": 1}), tmp_path / "run")
    assert Objects(url).folders() == listed
    assert RemoteStore(tmp_path / "other", Objects(url)).steps() == [6]
    # Negative control: by the listing alone it would be another.
    bucket.delete(f"runs/run/{INDEX}")
    assert RemoteStore(tmp_path / "other", Objects(url)).steps() == []


def test_storage_that_fails_for_good_ends_the_run_and_is_named(
    tiny_on_s3: Plain, tmp_path: Path, bucket: s3.Bucket, faulty: faulty_s3.Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.checkpoint.objects._LONGEST_PAUSE_S", 0.01)
    faulty.fault = lambda request: "throttle" * ("/checkpoint-000004-" in request.path)
    with pytest.raises(CheckpointError, match="step 4 could not be uploaded: the storage failed 6 times") as caught:
        runs.run_alone(tiny_on_s3, tmp_path / "run")
    assert "checkpoint-000004-" in str(caught.value.where)
    shutil.rmtree(tmp_path / "run")
    # A storage that cannot be asked says nothing of a checkpoint: it is not passed over.
    faulty.fault = lambda request: "throttle" * ("/checkpoint-000002-" in request.path and request.method == "GET")
    with pytest.raises(StorageError, match="failed 6 times"):
        runs.assemble_alone(tiny_on_s3, tmp_path / "run")
    faulty.fault = lambda request: ""
    assert runs.run_alone(tiny_on_s3, tmp_path / "run").loop.first_step == 3


# --- commands -------------------------------------------------------------------------------------------------------


def test_runs_behind_a_url_are_reported_listed_and_compared(
    tmp_path: Path, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, steps in (("one", 12), ("two", 20)):
        folder = recorded.write_run(tmp_path / name, steps=steps)
        recorded.write_evaluation(folder, [recorded.prediction(0, base=0, tuned=1)])
        for file in (one for one in folder.rglob("*") if one.is_file()):
            bucket.put(f"runs/{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
    bucket.put("runs/other/file.txt", b"no run")
    one, two = bucket.url("runs/one"), bucket.url("runs/two")
    code, out, err = runs.finray("report", one, "--json")
    assert (code, json.loads(out)["output"]) == (0, f"{one}/report.html"), err
    page = bucket.get("runs/one/report.html").decode()
    assert "12 of 12" not in page
    assert "tuned says 0" in page
    assert f"{one}, " in page
    both = tmp_path / "both.html"
    assert runs.finray("report", one, two, "--output", both)[0] == 0
    assert 'data-run="two"' in both.read_text(encoding="utf-8")
    listed = json.loads(runs.finray("runs", bucket.url("runs"), "--json")[1])["runs"]
    assert sorted((each["path"], each["step"]) for each in listed) == [(one, 12), (two, 20)]
    compared = json.loads(runs.finray("runs", "compare", one, two, "--json")[1])
    assert compared["results"]["step"] == [12, 20]
    assert "finished at step 20" in runs.finray("watch", two)[1]
    for words in (("report", bucket.url("runs/none")), ("runs", "compare", one, bucket.url("runs/none"))):
        code, out, err = runs.finray(*words)
        assert (code, out) == (2, "")
        assert "the run does not exist" in err
