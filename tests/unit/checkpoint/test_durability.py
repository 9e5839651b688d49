"""In which order a checkpoint becomes durable and visible, and which directories count as one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from finray.checkpoint import CheckpointStore, directory_name
from finray.checkpoint.store import fsync
from finray.errors import CheckpointError
from tests.support.checkpoints import write


def fill(folder: Path) -> None:
    (folder / "deep").mkdir()
    for name in ("b.bin", "a.bin", "deep/c.bin"):
        (folder / name).write_bytes(name.encode())


def test_files_are_durable_before_the_manifest_and_all_before_the_checkpoint_is_seen(tmp_path: Path) -> None:
    run, done = tmp_path / "run", []

    def sync(path: Path) -> None:
        inside = path.relative_to(run).parts
        names = [part for part in inside if not part.startswith((".tmp", ".part"))]
        assert path.exists()
        done.append(("/".join(names) or ("scratch" if inside else "run"), (run / directory_name(7)).exists()))

    def fence() -> None:
        done.append(("fence", (run / directory_name(7)).exists()))

    target = write(CheckpointStore(run, fence=fence, sync=sync), 7, fill)
    assert target == run / "checkpoint-000007"
    assert done == [
        *(("a.bin", False), ("b.bin", False), ("deep/c.bin", False), ("manifest.json", False)),
        *(("deep", False), ("scratch", False), ("fence", False), ("run", True)),
    ]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-000007"]
    assert sorted(path.name for path in target.iterdir()) == ["a.bin", "b.bin", "deep", "manifest.json"]


def test_durable_means_fsync_of_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.fspath(Path(f"/proc/self/fd/{handle}").readlink()))
    )
    (tmp_path / "a").write_text("x")
    before = len(list(Path("/proc/self/fd").iterdir()))
    fsync(tmp_path / "a")
    fsync(tmp_path)
    assert synced == [str(tmp_path / "a"), str(tmp_path)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert CheckpointStore(tmp_path)._sync is fsync


def test_a_step_that_comes_again_replaces_the_directory_and_leaves_no_rest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 3, fill)
    write(store, 3, lambda folder: (folder / "new").write_text("x") and None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    assert sorted(path.name for path in (tmp_path / "checkpoint-000003").iterdir()) == ["manifest.json", "new"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "no space left on the device"),
        (SafetensorError("Error: Os { code: 28 } (os error 28)"), "no space left on the device"),
        (OSError(errno.EACCES, "Permission denied"), "step 4 could not be written: Permission denied"),
        (SafetensorError("a strange one"), "step 4 could not be written: a strange one"),
    ],
)
def test_what_storage_says_is_said_with_the_step_and_the_place(tmp_path: Path, error: Exception, said: str) -> None:
    def broken(folder: Path) -> None:
        raise error

    with pytest.raises(CheckpointError, match=said) as caught:
        write(CheckpointStore(tmp_path), 4, broken)
    assert caught.value.where == str(tmp_path / "checkpoint-000004")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_any_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    tried = 0
    while True:
        left = [tried]

        def write_once(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def failing(folder: Path) -> None:
            for name in ("a.bin", "b.bin"):
                (folder / name).write_bytes(b"half")
                write_once()

        # File systems that allocate late say it when a file is made durable.
        def sync(path: Path) -> None:
            write_once()

        run = tmp_path / str(tried)
        write(CheckpointStore(run), 1, fill)
        message = ""
        try:
            write(CheckpointStore(run, sync=sync), 2, failing)
        except CheckpointError as error:
            message = error.message
        if not message:
            break
        assert "no space left on the device" in message
        if not (run / directory_name(2)).exists():
            assert [path.name for path in run.iterdir()] == [directory_name(1)]
        found = CheckpointStore(run).latest(pytest.fail)
        assert found is not None
        # Only the last, of the directory itself, comes after the checkpoint is there and whole.
        assert found.step == (2 if (run / directory_name(2)).exists() else 1)
        tried += 1
    assert tried == 2 + 2 + 1 + 1 + 1


def test_a_run_directory_that_cannot_be_made_is_an_error_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(CheckpointError, match="step 4 could not be written"):
        CheckpointStore(tmp_path / "run").begin(4)


def test_only_directories_named_like_checkpoints_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in (
        "checkpoint-000020",
        "checkpoint-000003",
        "checkpoint-1234567",
        "checkpoint-12",
        "x-checkpoint-000009",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-000005.before").mkdir()
    (tmp_path / "checkpoint-000004").write_text("a file")
    assert store.steps() == [3, 20, 1234567]
    assert directory_name(1234567) == "checkpoint-1234567"
    assert CheckpointStore(tmp_path / "none").steps() == []


def test_the_best_is_the_earliest_of_equals_among_those_that_say_the_metric(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, metrics in ((1, {}), (2, {"m": 2.0}), (3, {"m": 1.0}), (4, {"m": 1.0}), (5, {"m": 3.0}), (6, {"m": 0.5})):
        write(store, step, fill, **metrics)
    for step in (1, 6):
        (tmp_path / f"checkpoint-00000{step}" / "manifest.json").write_text("damaged")
    assert store.best("m", "min") == 3
    assert store.best("m", "max") == 5
    assert store.best("other", "min") is None
    # What the best rule keeps is beside the newest.
    assert store.prune(keep_last=1, best=("m", "min")) == [1, 2, 4, 5]
    assert store.steps() == [3, 6]


def test_checkpoints_that_were_passed_over_are_set_aside_only_where_that_is_asked_for(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(store, step, fill)
    for step in (2, 3):
        (tmp_path / directory_name(step) / "a.bin").unlink()
    found = store.latest()
    assert found is not None
    assert (found.step, store.steps()) == (1, [1, 2, 3])
    assert store.latest(steps=[1, 3], set_aside=store.set_aside) is not None
    assert store.steps() == [1, 2]
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob("damaged-*")] == ["damaged-checkpoint-000003"]


def test_all_that_are_damaged_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (write(store, step, fill) / "a.bin").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert caught.value.where == str(tmp_path)
    assert "--fresh" in str(caught.value)
    for step in (1, 2):
        assert f"{directory_name(step)}/a.bin" in str(caught.value)
