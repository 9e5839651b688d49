"""Copies of runs behind a URL: what is fetched, what goes back, and in which order, on a storage in memory."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import copies, manifest
from finray.checkpoint.copies import bring_back, local_copy, move_aside, pull, pull_folder, push_folder
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.config.paths import copy_path
from finray.errors import CheckpointError


@pytest.fixture
def objects(url: str) -> Objects:
    return Objects(url)


def listed(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder of files with their manifest."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    entries: list[manifest.Entry] = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    manifest.write(folder, entries, step=1, metrics={})
    return folder


def uploads(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written and removed, in order."""
    done: list[str] = []
    upload, remove = objects.upload, objects.remove
    monkeypatch.setattr(objects, "upload", lambda path, name: (done.append(name), upload(path, name)))
    monkeypatch.setattr(objects, "remove", lambda *names: (done.extend(f"-{one}" for one in names), remove(*names)))
    return done


def test_a_folder_is_there_when_its_manifest_is(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(tmp_path / "final", {"b": b"two", "a": b"one"})
    for older in ("final/manifest.json", "final/old", "final/b", "finals"):
        objects.write(older, b"older")
    done = uploads(objects, monkeypatch)
    push_folder(tmp_path, objects, "final")
    assert done == [
        *("-final/manifest.json", "-final/manifest.json", "-final/old"),
        *("final/a", "final/b", "final/manifest.json"),
    ]
    assert objects.files() == ["final/a", "final/b", "final/manifest.json", "finals"]


def test_a_folder_is_fetched_where_it_is_not_the_same_and_nothing_else_is_left(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(tmp_path / "here" / "final", {"a": b"one", "b": b"two", "c": b"three"})
    push_folder(tmp_path / "here", objects, "final")
    copy = tmp_path / "copy"
    assert pull_folder(copy, objects, "final")
    (copy / "final" / "b").write_bytes(b"TWO")
    (copy / "final" / "c").unlink()
    (copy / "final" / "stray").write_bytes(b"x")
    fetched: list[str] = []
    download = objects.download
    monkeypatch.setattr(
        objects, "download", lambda name, path, **of: (fetched.append(name), download(name, path, **of))
    )
    assert pull_folder(copy, objects, "final")
    assert fetched == ["final/b", "final/c"], "what is whole stays"
    assert {one.name: one.read_bytes() for one in (copy / "final").iterdir() if one.name != "manifest.json"} == {
        **{"a": b"one", "b": b"two", "c": b"three"}
    }
    assert pull_folder(tmp_path / "other", objects, "final", beside=copy / "final")
    assert len(fetched) == 2, "what another copy has is linked"
    assert all((tmp_path / "other" / "final" / name).samefile(copy / "final" / name) for name in "abc")
    objects.remove("final/manifest.json")
    assert not pull_folder(copy, objects, "final")
    assert not (copy / "final").exists()


def test_small_files_become_what_they_are_there_but_for_lines_that_were_added_here(
    objects: Objects, tmp_path: Path
) -> None:
    there = {"new": b"1", "changed": b"2", "same": b"3", "more.jsonl": b"a\n", "other.jsonl": b"b\n", "longer": b"4"}
    here = {"changed": b"x", "same": b"3", "more.jsonl": b"a\nb\n", "other.jsonl": b"c\nb\n", "longer": b"45"}
    for name, content in there.items():
        objects.write(name, content)
    for name, content in {**here, "gone": b"y", "kept": b"z"}.items():
        (tmp_path / name).write_bytes(content)
    before = (tmp_path / "same").stat().st_ino
    pull(tmp_path, objects, [*there, "gone", "never"])
    found = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert found == there | {"more.jsonl": b"a\nb\n", "kept": b"z"}
    assert (tmp_path / "same").stat().st_ino == before, "it is not written again"


def test_a_run_is_moved_so_that_a_kill_loses_nothing(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["config.yaml", "final/a", "final/manifest.json", "metrics.jsonl"]
    for name in names:
        objects.write(name, name.encode())
    done = uploads(objects, monkeypatch)
    copied: list[str] = []
    copy = objects.copy
    monkeypatch.setattr(objects, "copy", lambda *one: (copied.append(one[0]), done.append("copied"), copy(*one)))
    target = f"{objects.url}-2"
    move_aside(objects, target)
    assert done == ["copied"] * 4 + ["-final/manifest.json", "-final/a", "-metrics.jsonl", "-config.yaml"]
    assert objects.files() == []
    moved = Objects(target)
    assert {name: moved.read(name) for name in moved.files()} == {name: name.encode() for name in names}


def test_what_a_command_made_goes_back_to_the_run_that_was_named(url: str, objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"c")
    (tmp_path / "final").mkdir()
    made = tmp_path / "evaluation" / "train"
    made.mkdir(parents=True)
    # Made earlier, and by now perhaps again on another machine.
    (made.parent / "metrics.json").write_bytes(b"old")
    for number, (named, path) in enumerate(
        [(url, tmp_path), (f"{url}/final", tmp_path / "final"), (f"{url}/", tmp_path)]
    ):
        (made / "metrics.json").write_bytes(f"{number}".encode())
        bring_back(named, path, made)
        assert objects.read("evaluation/train/metrics.json") == f"{number}".encode()
        assert objects.files() == ["evaluation/train/metrics.json"]
    (made / "metrics.json").write_bytes(b"local")
    bring_back(tmp_path, tmp_path, made)
    assert objects.read("evaluation/train/metrics.json") == b"2", "a run that is no URL is where it is"


def test_a_local_copy_of_what_is_there(
    url: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    monkeypatch.setattr(copies, "read_path", lambda name: place)
    assert local_copy(tmp_path) == tmp_path
    assert local_copy("runs/run") == "runs/run"
    with pytest.raises(CheckpointError, match="the run does not exist") as caught:
        local_copy(url)
    assert caught.value.where == url
    objects.write("config.yaml", b"c")
    objects.write("summary.json", b"s")
    assert local_copy(f"{url}/", weights=False) == place
    assert sorted(one.name for one in place.iterdir()) == ["config.yaml", "summary.json"]
    with pytest.raises(CheckpointError, match="has no final/ yet"):
        local_copy(f"{url}/final")
    with pytest.raises(CheckpointError, match="the checkpoint does not exist"):
        local_copy(f"{url}/checkpoint-000004")
    listed(tmp_path / "made" / "final", {"weights": b"w"})
    push_folder(tmp_path / "made", objects, "final")
    objects.write("evaluation/deep/scores.json", b"e")
    assert local_copy(url, weights=False) == place
    assert {one.relative_to(place).as_posix() for one in place.rglob("*") if one.is_file()} == {
        *("config.yaml", "summary.json", "evaluation/deep/scores.json")
    }
    named: dict[str, Any] = {url: place, f"{url}/final": place / "final"}
    for name, expected in named.items():
        assert local_copy(name) == expected
        assert (place / "final" / "weights").read_bytes() == b"w"


def test_reading_a_run_leaves_the_copy_that_its_workers_write_alone(
    url: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = copy_path(url)
    theirs = {"config.yaml": b"c", "run_id": b"one", "metrics.jsonl": b"1\n", "starts.jsonl": b"other\n"}
    for name, content in theirs.items():
        objects.write(name, content)
    # The workers go on, and their final model is not behind the URL yet.
    listed(own / "final", {"weights": b"w" * 20})
    newer = {"run_id": b"one", "metrics.jsonl": b"1\n2\n", "starts.jsonl": b"mine\n", "failures.jsonl": b"f\n"}
    for name, content in newer.items():
        (own / name).write_bytes(content)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in own.rglob("*") if path.is_file()}

    def read() -> dict[str, bytes]:
        path = Path(local_copy(url, weights=False))
        assert path != own
        return {one.name: one.read_bytes() for one in path.iterdir()}

    # Records that only continue those at the URL are shown already, and failures, which stay on this machine.
    assert read() == {**theirs, "metrics.jsonl": b"1\n2\n", "failures.jsonl": b"f\n"}
    with pytest.raises(CheckpointError, match="has no final/ yet"):
        local_copy(f"{url}/final")
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in own.rglob("*") if path.is_file()} == before
    # Whole files of it need not be fetched again; others are.
    push_folder(own, objects, "final")
    final = Path(local_copy(f"{url}/final"))
    assert (final / "weights").stat().st_ino == (own / "final" / "weights").stat().st_ino
    shutil.rmtree(final)
    (own / "final" / "weights").write_bytes(b"damaged, and of 20 b")
    assert (Path(local_copy(f"{url}/final")) / "weights").read_bytes() == b"w" * 20
    # Those of another run are none of this one.
    objects.write("run_id", b"two")
    assert read() == {**theirs, "run_id": b"two"}


# --- checkpoints of a run behind a URL ------------------------------------------------------------------------------


@pytest.fixture
def place(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the local copy of a run will be that has checkpoints of steps 2, 4 and 6, and no `final/`."""

    def fill(folder: Path) -> None:
        (folder / "training_state").mkdir()
        (folder / "model").write_bytes(b"weights")
        (folder / "training_state" / "state.json").write_bytes(b"{}")

    objects.write("config.yaml", b"c")
    objects.write("run_id", b"one")
    store = RemoteStore(tmp_path / "made", objects, attempt="0123abcdef99")
    store.take()
    for step in (2, 4, 6):
        scratch = store.begin(step)
        store.commit(scratch, step, store.fill(scratch, step, fill), metrics={})
    monkeypatch.setattr(copies, "read_path", lambda name: tmp_path / "copy")
    return tmp_path / "copy"


def brought(place: Path) -> list[str]:
    """Files of checkpoints in the local copy, without manifests."""
    files = [one.relative_to(place).as_posix() for one in place.glob("checkpoint-*/**/*") if one.is_file()]
    return sorted(one for one in files if not one.endswith(manifest.NAME))


def whole(step: int) -> list[str]:
    return [f"checkpoint-{step:06d}/{name}" for name in ("model", "training_state/state.json")]


def test_the_newest_whole_checkpoint_comes_where_there_is_no_final(url: str, objects: Objects, place: Path) -> None:
    assert local_copy(url) == place
    assert brought(place) == whole(6)
    objects.write("checkpoint-000006-0123abcd/manifest.json", b"{}")
    shutil.rmtree(place)
    assert local_copy(url) == place
    assert brought(place) == whole(4)


@pytest.mark.parametrize("name", ["checkpoint-000002", "checkpoint-000002-0123abcd"])
def test_a_checkpoint_that_is_named_comes_alone(url: str, place: Path, name: str) -> None:
    assert local_copy(f"{url}/{name}") == place / "checkpoint-000002"
    assert brought(place) == whole(2)
    assert manifest.verify(place / "checkpoint-000002")["step"] == 2


@pytest.mark.parametrize(("lost", "step"), [((), 6), ((6,), 4), ((4, 6), 2), ((2, 4, 6), None)])
def test_a_final_model_comes_with_the_counters_of_the_newest_checkpoint_that_has_them(
    url: str, objects: Objects, place: Path, tmp_path: Path, lost: tuple[int, ...], step: int | None
) -> None:
    listed(tmp_path / "done" / "final", {"weights": b"w"})
    push_folder(tmp_path / "done", objects, "final")
    for one in lost:
        objects.remove(f"checkpoint-{one:06d}-0123abcd/training_state/state.json")
    assert local_copy(url) == place
    assert (place / "final" / "weights").read_bytes() == b"w"
    assert brought(place) == ([] if step is None else whole(step)[1:])


def test_a_checkpoint_is_named_by_its_number_and_not_by_its_first_digits(
    url: str, objects: Objects, tmp_path: Path, place: Path
) -> None:
    store = RemoteStore(tmp_path / "made", objects, attempt="0123abcdef99")
    for step in (100_000, 1_000_000):
        scratch = store.begin(step)
        store.commit(scratch, step, store.fill(scratch, step, lambda _: None), metrics={})
    assert local_copy(f"{url}/checkpoint-1000000") == place / "checkpoint-1000000"
    with pytest.raises(CheckpointError, match="the checkpoint does not exist"):
        local_copy(f"{url}/checkpoint-10000000")
    with pytest.raises(CheckpointError, match="the run does not exist"):
        local_copy(f"{url}/checkpoint-000002junk")


def test_a_checkpoint_that_is_not_behind_the_url_does_not_stay_in_the_copy(
    url: str, objects: Objects, tmp_path: Path, place: Path
) -> None:
    local_copy(f"{url}/checkpoint-000006")
    RemoteStore(tmp_path / "made", objects).delete([6])
    local_copy(url)
    assert brought(place) == whole(4)


def test_nothing_of_another_run_at_the_url_stays_in_the_copy(url: str, objects: Objects, place: Path) -> None:
    local_copy(f"{url}/checkpoint-000002")
    (place / "evaluation").mkdir()
    (place / "evaluation" / "metrics.json").write_bytes(b"scores")
    local_copy(url, weights=False)
    assert brought(place) == whole(2), "of the same run they stay"
    objects.write("run_id", b"two")
    local_copy(url, weights=False)
    assert sorted(one.name for one in place.iterdir()) == ["attempt", "config.yaml", "run_id"]
    # A copy that does not say whose it is keeps what it has.
    local_copy(f"{url}/checkpoint-000004")
    (place / "run_id").unlink()
    local_copy(url, weights=False)
    assert brought(place) == whole(4)
