"""Checkpoints behind a URL, on a storage in memory: what is there when, who may write, what is fetched and removed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finray.checkpoint import manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import INDEX, RemoteStore
from finray.checkpoint.store import ATTEMPT_FILE
from finray.errors import CheckpointError, StorageError
from finray.files import sealed

FILES = {"model": b"weights", "training_state/state.json": b"{}"}


def fill(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "training_state").mkdir()
        for name, content in FILES.items():
            (folder / name).write_bytes(content + b" %d" % step)

    return write


def save(store: RemoteStore, step: int, **metrics: float) -> Path:
    scratch = store.begin(step)
    return store.commit(scratch, step, store.fill(scratch, step, fill(step)), metrics=metrics)


@pytest.fixture
def store(url: str, tmp_path: Path) -> RemoteStore:
    """With checkpoints of the steps 2, 4 and 6, of which the second is the best."""
    store = RemoteStore(tmp_path / "run", Objects(url), attempt="0123abcdef99")
    store.take()
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
        save(store, step, loss=loss)
    return store


@pytest.fixture
def other(store: RemoteStore, url: str, tmp_path: Path) -> RemoteStore:
    """Of another machine, that has nothing yet."""
    return RemoteStore(tmp_path / "other", Objects(url))


def folder(step: int) -> str:
    return f"checkpoint-{step:06d}-0123abcd"


def objects_of(store: RemoteStore, step: int) -> set[str]:
    return {one.partition("/")[2] for one in Objects(store.where).files(folder(step))}


def test_a_checkpoint_is_here_and_behind_the_url(store: RemoteStore, url: str) -> None:
    assert store.where == url
    assert store.steps() == [2, 4, 6]
    assert store.places() == {step: folder(step) for step in (2, 4, 6)}
    for step in (2, 4, 6):
        assert objects_of(store, step) == {*FILES, manifest.NAME}
        assert (store.path_of(step) / "model").read_bytes() == b"weights %d" % step
        assert Objects(url).read(f"{folder(step)}/model") == b"weights %d" % step
    assert Objects(url).read(ATTEMPT_FILE) == b"0123abcdef99"
    assert (store.run_dir / ATTEMPT_FILE).read_text() == "0123abcdef99"
    index = json.loads(Objects(url).read(INDEX) or b"")
    assert index["checkpoints"] == [{"step": step, "folder": folder(step)} for step in (2, 4, 6)]


def test_another_machine_fetches_what_it_lacks_and_leaves_nothing_else(
    other: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    download = other._objects.download
    monkeypatch.setattr(
        other._objects, "download", lambda name, path, **of: (fetched.append(name), download(name, path, **of))
    )
    content = other.verify(4)
    assert content["metrics"] == {"loss": 1.0}
    assert fetched == [f"{folder(4)}/{name}" for name in FILES]
    assert manifest.read(other.path_of(4)) == content
    (other.path_of(4) / "stray").write_bytes(b"x")
    (other.path_of(4) / "model").write_bytes(b"weights 5")
    (other.path_of(4) / manifest.NAME).write_bytes(b"{}")
    fetched.clear()
    assert other.verify(4) == content
    assert fetched == [f"{folder(4)}/model"], "what is whole stays"
    assert {one.name for one in other.path_of(4).iterdir()} == {"model", "training_state", manifest.NAME}
    assert manifest.read(other.path_of(4)) == content
    assert other.fetch_file(6, "training_state/state.json").read_bytes() == b"{} 6"
    assert not (other.path_of(6) / "model").exists(), "one file is enough"


def test_a_checkpoint_that_lost_its_manifest_or_a_file_is_named(other: RemoteStore) -> None:
    objects = other._objects
    objects.remove(f"{folder(4)}/{manifest.NAME}")
    objects.remove(f"{folder(2)}/model")
    objects.write(f"{folder(6)}/model", b"weights 7")
    assert other.steps() == [2, 4, 6], "the index says so"
    for step, said in ((2, "is missing"), (4, "is missing"), (6, "has changed since it was written")):
        with pytest.raises(CheckpointError, match=said) as caught:
            other.verify(step)
        assert folder(step) in str(caught.value.where)


@pytest.mark.parametrize("index", [None, b"", b"{}", b'{"checkpoints": []}'])
def test_without_an_index_what_was_finished_is_found_by_its_manifest(other: RemoteStore, index: bytes | None) -> None:
    objects = other._objects
    objects.remove(INDEX, f"{folder(2)}/{manifest.NAME}")
    if index is not None:
        objects.write(INDEX, index)
    objects.write("checkpoint-odd/manifest.json", b"{}")
    assert other.places() == {4: folder(4), 6: folder(6)}


def test_the_fence_stops_an_attempt_that_was_overtaken(store: RemoteStore, url: str, tmp_path: Path) -> None:
    store.check()
    RemoteStore(tmp_path / "second", Objects(url), attempt="second").take()
    for action in (store.check, lambda: save(store, 8), lambda: store.add_metrics(4, {"more": 1.0})):
        with pytest.raises(CheckpointError, match="another process has taken over this run"):
            action()
    assert RemoteStore(tmp_path / "third", Objects(url)).steps() == [2, 4, 6]
    assert not list(store.run_dir.glob(".tmp-manifest-*"))
    Objects(url).remove(ATTEMPT_FILE)
    with pytest.raises(CheckpointError, match="another process"):
        store.check()


def test_a_run_that_is_overtaken_while_it_uploads_is_not_named(
    store: RemoteStore, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload = store._objects.upload

    def slow(path: Path, name: str) -> None:
        upload(path, name)
        if name.endswith(manifest.NAME):
            RemoteStore(tmp_path / "second", Objects(url), attempt="second").take()

    monkeypatch.setattr(store._objects, "upload", slow)
    with pytest.raises(CheckpointError, match="another process"):
        save(store, 8)
    assert [one["step"] for one in json.loads(Objects(url).read(INDEX) or b"")["checkpoints"]] == [2, 4, 6]


def test_other_files_of_the_run_follow_where_they_have_changed(store: RemoteStore, url: str) -> None:
    metrics, config = store.run_dir / "metrics.jsonl", store.run_dir / "config.yaml"
    metrics.write_bytes(b"1\n")
    (store.run_dir / "unknown").write_bytes(b"x")
    (store.run_dir / "profile").mkdir()
    (store.run_dir / "profile" / "mine").write_bytes(b"x")
    (store.run_dir.parent / "elsewhere").write_bytes(b"x")
    (store.run_dir / "profile" / "link").symlink_to(store.run_dir.parent / "elsewhere")
    store.sync_records()
    assert (Objects(url).read("profile/mine"), Objects(url).read("profile/link")) == (b"x", None)
    assert Objects(url).read("metrics.jsonl") == b"1\n"
    assert Objects(url).read("unknown") is None
    Objects(url).write("metrics.jsonl", b"theirs")
    store.sync_records()
    assert Objects(url).read("metrics.jsonl") == b"theirs", "what has not changed here is not sent again"
    metrics.write_bytes(b"1\n2\n")
    store.sync_records()
    assert Objects(url).read("metrics.jsonl") == b"1\n2\n"
    assert not config.exists()


def test_a_damaged_checkpoint_is_named_no_more_and_what_is_left_of_it_stays(store: RemoteStore, url: str) -> None:
    store.set_aside(4)
    assert store.steps() == [2, 6]
    assert RemoteStore(store.run_dir, Objects(url)).steps() == [2, 6]
    left = objects_of(store, 4)
    assert "model" in left
    assert manifest.NAME not in left
    assert len(left) == 3
    assert not store.path_of(4).exists()
    Objects(url).remove(f"{folder(2)}/{manifest.NAME}")
    store.set_aside(2)
    assert store.steps() == [6]


def test_metrics_that_come_later_stand_in_the_manifest(store: RemoteStore, other: RemoteStore, url: str) -> None:
    store.add_metrics(4, {"more": 5.0})
    store.add_metrics(9, {"more": 5.0})
    assert store.content(4)["metrics"] == other.content(4)["metrics"] == {"loss": 1.0, "more": 5.0}
    assert other.verify(4)["files"] == store.content(4)["files"]
    assert not list(store.run_dir.glob(".tmp-manifest-*"))
    damaged = RemoteStore(store.run_dir, Objects(url), attempt="0123abcdef99")
    Objects(url).write(f"{folder(6)}/{manifest.NAME}", b"{")
    damaged.add_metrics(6, {"more": 5.0})
    assert Objects(url).read(f"{folder(6)}/{manifest.NAME}") == b"{", "of a damaged one there is nothing to say"


def test_retention_keeps_the_newest_the_best_and_what_is_asked_for(store: RemoteStore, url: str) -> None:
    save(store, 8, loss=4.0)
    assert store.prune(keep_last=1, best=("loss", "min"), others=[2]) == [6]
    assert store.steps() == [2, 4, 8]
    assert objects_of(store, 6) == set()
    assert not store.path_of(6).exists()
    assert store.prune(keep_last=1, best=None) == [2, 4]
    assert RemoteStore(store.run_dir, Objects(url)).steps() == [8]
    assert [one.name for one in store.run_dir.glob("checkpoint-*")] == ["checkpoint-000008"]
    assert objects_of(store, 8) == {*FILES, manifest.NAME}


def test_what_is_removed_loses_its_name_first(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    write, remove = store._objects.write, store._objects.remove
    monkeypatch.setattr(store._objects, "write", lambda name, content: (done.append(name), write(name, content)))
    monkeypatch.setattr(store._objects, "remove", lambda *names: (done.extend(names), remove(*names)))
    store.drop_after(4)
    assert done == [INDEX, f"{folder(6)}/{manifest.NAME}", *(f"{folder(6)}/{name}" for name in FILES)]
    assert store.steps() == [2, 4]
    assert not store.path_of(6).exists()
    done.clear()
    store.drop_after(4)
    assert done == []


def test_ranks_on_other_machines_keep_nothing_of_what_they_filled(store: RemoteStore, tmp_path: Path) -> None:
    scratch = tmp_path / "there" / ".tmp"
    store.open_part(scratch)
    store.open_part(scratch)
    assert scratch.is_dir()
    store.close_part(scratch)
    assert not scratch.exists()
    store.close_part(scratch)


def test_only_what_is_named_like_a_checkpoint_is_taken_from_the_index(other: RemoteStore) -> None:
    places = [
        *({"step": 4, "folder": folder(4)}, {"step": 8, "folder": folder(8)}),
        *({"step": 9, "folder": "../run-2/checkpoint-000009-0123abcd"}, {"step": 10, "folder": "final"}),
    ]
    other._objects.write(INDEX, json.dumps(sealed({"checkpoints": places})).encode())
    # What the listing has beside it was written just before a crash.
    assert other.places() == {step: folder(step) for step in (2, 4, 6, 8)}


def test_a_disk_that_is_full_says_nothing_about_the_checkpoint(
    other: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(other._objects, "download", full)
    with pytest.raises(StorageError, match="cannot be fetched: No space left on device") as caught:
        other.verify(4)
    assert caught.value.where == str(other.path_of(4) / "model")


@pytest.mark.parametrize("where", ["s3://there/x", None])
def test_storage_that_fails_while_a_checkpoint_is_written_is_an_error_of_the_checkpoint(
    store: RemoteStore, url: str, monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StorageError("the storage is away", where=where, repair="wait")

    objects = store._objects
    ways = {
        **{"upload": lambda: save(store, 8), "write": lambda: store.delete([4, 6])},
        **{"remove": lambda: store.delete([2, 4, 6]), "read": lambda: save(store, 8)},
    }
    for name, action in ways.items():
        with monkeypatch.context() as patch:
            patch.setattr(objects, name, away)
            step = 8 if name in ("upload", "read") else 6
            with pytest.raises(CheckpointError, match=f"step {step} could not be uploaded: the storage") as caught:
                action()
        assert (caught.value.where, caught.value.repair) == (where or url, "wait")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_known", {2: folder(2)})
        patch.setattr(objects, "upload", away)
        with pytest.raises(CheckpointError, match="step 2 could not be uploaded"):
            store.add_metrics(2, {"loss": 1.0})
    assert not list(store.run_dir.glob(".tmp-manifest-*"))


def test_a_checkpoint_whose_manifest_is_damaged_is_deleted_too(other: RemoteStore) -> None:
    other._objects.write(f"{folder(4)}/{manifest.NAME}", b"{")
    other.delete([4, 6])
    assert other.steps() == [2]
    assert objects_of(other, 6) == set()
    # What else it held is known only from its manifest.
    assert objects_of(other, 4) == set(FILES)
    other.delete([])
    assert other.steps() == [2]


def begin(url: str, path: Path, attempt: str) -> tuple[RemoteStore, Path]:
    """An attempt that is killed while it writes step 8."""
    store = RemoteStore(path, Objects(url), attempt=attempt)
    scratch = store.begin(8)
    store.fill(scratch, 8, fill(8))
    return store, scratch


@pytest.mark.parametrize("days", [0.9, 1.1])
def test_what_a_killed_attempt_uploaded_is_removed_after_a_day(
    store: RemoteStore, url: str, tmp_path: Path, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(url, tmp_path / "killed", "76543210ffff")
    store.set_aside(4)
    before = set(Objects(url).files())
    unfinished = {one for one in before if one.startswith("checkpoint-000008-76543210/")}
    assert len(unfinished) == len(FILES)
    monkeypatch.setattr(Objects, "age_s", lambda self, name: days * 86_400)
    after = RemoteStore(tmp_path / "after", Objects(url), attempt="aaaaaaaaaaaa")
    after.take()
    after.clear_url()
    # What was finished stays, and what is kept of a damaged one.
    assert set(Objects(url).files()) == (before if days < 1 else before - unfinished)
    assert after.steps() == [2, 6]


def test_the_scratch_of_a_killed_attempt_is_removed_on_its_machine(store: RemoteStore, url: str) -> None:
    killed, scratch = begin(url, store.run_dir, "76543210ffff")
    after = RemoteStore(store.run_dir, Objects(url), attempt="aaaaaaaaaaaa")
    after.take()
    after.clear()
    assert not scratch.exists()
    assert [path.name for path in sorted(store.run_dir.glob("*checkpoint-*"))] == [
        "checkpoint-000002",
        "checkpoint-000004",
        "checkpoint-000006",
    ]
    # Were it alive, it could not finish: the run has been taken over.
    with pytest.raises(CheckpointError):
        killed.commit(scratch, 8, [], metrics={})
