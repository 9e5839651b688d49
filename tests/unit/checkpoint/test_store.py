"""Checkpoints: whole or not at all; any damage is found and named; the right ones are kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray import files
from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.store import Fence, to_delete
from finray.errors import CheckpointError
from tests.support import damaged
from tests.support.checkpoints import write

FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "training_state/state.json",
    "training_state/optimizer-00001-of-00001.safetensors",
)


def fill(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "training_state").mkdir()
        for name in FILES:
            (folder / name).write_bytes(f"{name} at {step} ".encode() * 50)

    return write


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run")
    for step in (10, 20):
        write(store, step, fill(step))
    return store


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def no_warning(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip], ids=["missing", "truncated", "one bit flipped"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(
    store: CheckpointStore, name: str, damage: Callable[[Path], None]
) -> None:
    damage(store.run_dir / "checkpoint-000020" / name)
    warnings: list[str] = []
    found = store.latest(warnings.append)
    assert found is not None
    assert found.step == 10
    assert len(warnings) == 1
    assert f"checkpoint-000020/{name}" in warnings[0]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "run").latest(no_warning) is None


def test_a_mistake_of_ours_is_not_dressed_up(store: CheckpointStore) -> None:
    def wrong(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(store, 30, wrong)
    assert store.steps() == [10, 20]


@given(st.lists(st.integers(1, 100), unique=True).map(sorted), st.integers(1, 5), st.none() | st.integers(1, 100))
def test_retention_never_deletes_the_newest_or_the_best(steps: list[int], keep: int, best: int | None) -> None:
    doomed = to_delete(steps, keep_last=keep, best=best)
    assert not set(doomed) & set(steps[-keep:])
    assert best not in doomed
    assert len(steps) - len(doomed) <= keep + 1


def test_an_attempt_that_was_overtaken_cannot_write(tmp_path: Path) -> None:
    old, new = Fence(tmp_path), Fence(tmp_path)
    old.take()
    store = CheckpointStore(tmp_path, fence=old.check)
    write(store, 1, fill(1))
    new.take()
    with pytest.raises(CheckpointError, match="another process"):
        write(store, 2, fill(2))
    assert store.steps() == [1]


def test_later_metrics_are_added_to_the_manifest_of_a_whole_checkpoint(tmp_path: Path) -> None:
    durable: list[tuple[str, bool]] = []
    file = tmp_path / "checkpoint-000020" / "manifest.json"

    def sync(path: Path) -> None:
        durable.append((path.name, "later" in file.read_text() if file.exists() else False))

    store = CheckpointStore(tmp_path, sync=sync)
    write(store, 20, fill(20), loss=2.0, kept=1.0)
    before = store.content(20)["files"]
    durable.clear()
    store.add_metrics(20, {"loss": 1.5, "later": 3.0})
    assert durable == [("manifest.json", False), ("checkpoint-000020", True)]
    content = manifest.verify(file.parent)
    assert (content["step"], content["files"]) == (20, before)
    assert content["metrics"] == {"loss": 1.5, "kept": 1.0, "later": 3.0}
    store.add_metrics(10, {"loss": 1.0})
    cut(file)
    damaged_text = file.read_bytes()
    store.add_metrics(20, {"loss": 1.0})
    assert file.read_bytes() == damaged_text
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000020"]


def test_later_metrics_of_an_attempt_that_was_overtaken_are_not_written(store: CheckpointStore) -> None:
    old, new = Fence(store.run_dir), Fence(store.run_dir)
    old.take()
    new.take()
    with pytest.raises(CheckpointError, match="another process"):
        CheckpointStore(store.run_dir, fence=old.check).add_metrics(20, {"loss": 1.0})
    assert store.content(20)["metrics"] == {}

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="step 20 could not be written: no space left"):
        CheckpointStore(store.run_dir, sync=full).add_metrics(20, {"loss": 1.0})
    assert store.content(20)["metrics"] == {}


def test_checkpoints_after_the_one_that_is_gone_back_to_are_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        write(store, step, fill(step))
    store.drop_after(2)
    assert store.steps() == [1, 2]
    assert store.prune(keep_last=1, best=None, others=[1]) == []
    assert store.prune(keep_last=1, best=None, others={2}) == [1]


# --- files that cannot be read, and every bit ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_file_that_cannot_be_read_is_passed_over_like_a_damaged_one(
    store: CheckpointStore, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged.unreadable(store.run_dir / "checkpoint-000020" / name, monkeypatch, number)
    warnings: list[str] = []
    found = store.latest(warnings.append)
    assert found is not None
    assert found.step == 10
    assert warnings[0].startswith("skipped a damaged checkpoint: ")
    assert f"{name}: cannot be read: {os.strerror(number)}" in warnings[0]


def test_a_directory_or_a_fifo_in_the_place_of_a_file_is_passed_over(store: CheckpointStore) -> None:
    for make in (Path.mkdir, os.mkfifo):
        file = store.run_dir / "checkpoint-000020" / FILES[0]
        file.rmdir() if file.is_dir() else file.unlink()
        make(file)
        warnings: list[str] = []
        found = store.latest(warnings.append)
        assert found is not None
        assert found.step == 10
        assert "is not a file" in warnings[0]


@given(st.data())
def test_one_flipped_bit_or_a_cut_anywhere_in_a_checkpoint_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        store = CheckpointStore(Path(place))
        folder = write(store, 20, fill(20), eval_loss=0.25)
        said = manifest.read(folder)
        file = folder / data.draw(st.sampled_from([*FILES, "manifest.json"]))
        damaged.draw(file, data)
        try:
            found = manifest.verify(folder)
        except CheckpointError as error:
            named = error.where
        else:
            # A JSON text may say the same in other letters, such as 1e-5 and 1E-5.
            assert (found, file.name) == (said, "manifest.json")
            named = str(file)
        assert named == str(file)


def test_a_sealed_manifest_of_another_shape_is_refused(tmp_path: Path) -> None:
    for content in ({}, {"format_version": 2, "step": "1", "metrics": {}, "files": []}, {"format_version": 2}):
        (tmp_path / "manifest.json").write_text(json.dumps(files.sealed(content)))
        with pytest.raises(CheckpointError, match="has invalid content"):
            manifest.read(tmp_path)


@pytest.mark.parametrize("version", [1, 3])
def test_a_checkpoint_of_another_format_version_is_passed_over(store: CheckpointStore, version: int) -> None:
    """Whole and sealed: only its version says that it means something else."""
    path = store.run_dir / "checkpoint-000020" / manifest.NAME
    content = json.loads(path.read_text())
    del content["seal"]
    content["format_version"] = version
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "seal": seal}))
    warnings: list[str] = []
    found = store.latest(warnings.append)
    assert found is not None
    assert found.step == 10
    assert f"format version {version}" in warnings[0]
    assert warnings[0].startswith("skipped a checkpoint: ")
    # It is whole: another version of finray reads it.
    assert store.latest(set_aside=store.set_aside) is not None
    assert store.steps() == [10, 20]
    (store.run_dir / "checkpoint-000010" / manifest.NAME).unlink()
    with pytest.raises(CheckpointError, match=f"has format version {version}; this finray reads 2") as caught:
        store.latest()
    assert (caught.value.where, str(caught.value.repair).partition(" ")[0]) == (str(path), "use")
    # Where the newest is damaged, the error names all.
    os.replace(store.run_dir / "checkpoint-000020", store.run_dir / "checkpoint-000005")
    with pytest.raises(CheckpointError, match="all checkpoints of the run are damaged"):
        store.latest()


@pytest.mark.parametrize("path", ["../../victim.txt", "/victim.txt", "a/../../victim.txt"])
def test_a_manifest_behind_a_url_writes_nothing_outside_of_its_directory(path: str, tmp_path: Path) -> None:
    """It may be somebody else's; the file that it names is there."""
    from finray.checkpoint.copies import pull_folder
    from finray.checkpoint.objects import Objects

    url = f"memory://{tmp_path.name}"
    objects = Objects(f"{url}/bucket/run")
    content = b"from outside"
    entry: manifest.Entry = {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "made").mkdir()
    manifest.write(tmp_path / "made", [entry], step=1, metrics={})
    objects.write(f"final/{manifest.NAME}", (tmp_path / "made" / manifest.NAME).read_bytes())
    Objects(f"{url}/bucket").write("victim.txt", content)
    copy = tmp_path / "cache" / "copies" / "run"
    with pytest.raises(CheckpointError, match="outside its directory"):
        pull_folder(copy, objects, "final")
    assert list(tmp_path.rglob("victim.txt")) == []
