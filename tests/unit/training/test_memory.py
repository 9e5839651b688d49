"""Checkpoints in memory with ranks as threads: which is fetched, what of it is refused, what is left on the disk."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.checkpoint import Checkpoint
from finray.training import memory as module
from finray.training.checkpointing import Snapshot
from finray.training.memory import MemoryPart, MemoryWriter, _scratch_root, fetch_newest, whole
from tests.support.ranks import Group
from tests.support.small_disk import files_of_at_most


class Kept:
    """Keeps parts in this process."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], tuple[MemoryPart, dict[str, bytes]]] = {}
        self.lost: list[tuple[int, int]] = []

    def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
        self.held[part.step, part.rank] = part, dict(files)

    def parts(self) -> Sequence[MemoryPart]:
        return [part for part, _ in self.held.values()]

    def get(self, part: MemoryPart) -> Mapping[str, bytes] | None:
        key = part.step, part.rank
        return None if key in self.lost else self.held[key][1]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories in memory would be."""
    root = tmp_path / "scratch"
    root.mkdir()
    monkeypatch.setattr(module, "_scratch_root", lambda size: root)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(root))
    return root


def weights(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    return {f"model-{rank}.safetensors": {"w": torch.full((3,), float(rank))}}


def stored(run_dir: Path, steps: Sequence[int], *, world: int = 2, every: int = 1) -> Kept:
    """Every rank stores its part of each step."""
    memory = Kept()
    run_dir.mkdir(exist_ok=True)

    def run(strategy: Any) -> None:
        writer = MemoryWriter(memory, strategy, run_dir, every, pytest.fail, "attempt", records=True)
        for step in steps:
            if strategy.rank == 0:
                (run_dir / "metrics.jsonl").write_text("".join(f"{number}\n" for number in range(step)))
            writer.ready()
            texts = {"training_state/state.json": f"{step}"} if strategy.rank == 0 else {}
            writer.begin(Snapshot(weights(strategy.rank), [], "moments", texts), step)
        writer.close()

    assert Group(world).run(run) == [None] * world
    return memory


def fetched(memory: Kept, run_dir: Path, *, after: int = 0, world: int = 2) -> tuple[list[Any], list[str]]:
    warned: list[str] = []
    found = Group(world).run(lambda strategy: fetch_newest(memory, strategy, run_dir, after=after, warn=warned.append))
    return found, warned


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_newest_checkpoint_comes_back_whole_for_any_number_of_ranks(
    tmp_path: Path, scratch: Path, world: int
) -> None:
    memory = stored(tmp_path / "run", [2, 4])
    assert list(scratch.iterdir()) == [], "nothing is left of what was written to be stored"
    (tmp_path / "run" / "metrics.jsonl").write_text("0\n1\n")
    (scratch / f"{module._prefix(tmp_path / 'run')}rest").mkdir()
    found, warned = fetched(memory, tmp_path / "run", world=world)
    (folder,) = scratch.iterdir()
    names = ["model-0.safetensors", "model-1.safetensors", "training_state/moments", "training_state/state.json"]
    for one in found:
        assert isinstance(one, Checkpoint)
        assert (one.path, one.step, sorted(one.files)) == (folder, 4, names)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {*names}
    assert (folder / "training_state" / "state.json").read_text() == "4"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "0\n1\n2\n3\n"
    assert warned == []


def test_what_killed_workers_of_another_run_left_is_removed_and_what_is_loaded_is_not(
    tmp_path: Path, scratch: Path
) -> None:
    left = scratch / f"{module._prefix(tmp_path / 'other')}rest"
    left.mkdir()
    found, _ = fetched(stored(tmp_path / "run", [2]), tmp_path / "run", world=1)
    for folder in (left, found[0].path):
        os.utime(folder, (0, 0))
    module.remove_left()
    assert list(scratch.iterdir()) == [found[0].path]


@pytest.mark.parametrize(("after", "step"), [(0, 4), (3, 4), (4, None), (9, None)])
def test_only_what_is_newer_is_fetched(tmp_path: Path, after: int, step: int | None) -> None:
    found, _ = fetched(stored(tmp_path / "run", [2, 4]), tmp_path / "run", after=after)
    assert [one and one.step for one in found] == [step] * 2


def test_records_that_went_on_otherwise_stay(tmp_path: Path) -> None:
    memory = stored(tmp_path / "run", [2, 4])
    for text in ("0\nother\n", "0\n1\n2\n3\n4\n"):
        (tmp_path / "run" / "metrics.jsonl").write_text(text)
        fetched(memory, tmp_path / "run")
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == text


def test_a_disk_without_room_leaves_the_records_as_they_are_and_the_checkpoint_on_storage_is_used(
    tmp_path: Path, scratch: Path
) -> None:
    memory, path = stored(tmp_path / "run", [2, 4]), tmp_path / "run" / "metrics.jsonl"
    long = "".join(f"{number}\n" for number in range(2000))
    memory.held = {key: one for key, one in memory.held.items() if key[0] == 4}
    part, files = memory.held[4, 0]
    files["metrics.jsonl"] = (long + "4\n").encode()
    digests = {**part.digests, "metrics.jsonl": hashlib.sha256(files["metrics.jsonl"]).hexdigest()}
    memory.held[4, 0] = replace(part, digests=digests), files
    path.write_text(long)
    with files_of_at_most(4096):
        found, warned = fetched(memory, tmp_path / "run")
    assert found == [None, None]
    assert path.read_text() == long
    assert list(scratch.iterdir()) == []
    assert len(warned) == 1
    assert "step 4 in memory: cannot be written" in warned[0]
    # Control: with room it is there.
    assert [one.step for one in fetched(memory, tmp_path / "run")[0]] == [4, 4]
    assert path.read_text() == long + "4\n"


def test_a_part_that_would_be_ahead_of_the_records_is_stored_by_no_rank(tmp_path: Path) -> None:
    def run(strategy: Any) -> bool:
        writer = MemoryWriter(Kept(), strategy, tmp_path, 1, pytest.fail, "attempt")
        return writer.ready(is_whole=strategy.rank > 0) or writer.ready() is False

    assert Group(2).run(run) == [False, False]


def test_a_machine_without_records_takes_them_over_where_the_first_rank_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two new machines with a rank each: both fetch all parts, and neither has the run's records."""
    memory = stored(tmp_path / "run", [2, 4])
    monkeypatch.setattr(module, "ranks_here", lambda strategy, folder: [strategy.rank])
    for rank in range(2):
        (tmp_path / f"run-{rank}").mkdir()
    found = Group(2).run(
        lambda strategy: fetch_newest(
            memory, strategy, tmp_path / f"run-{strategy.rank}", after=0, warn=lambda text: None
        )
    )
    assert [one.step for one in found] == [4, 4]
    assert (tmp_path / "run-0" / "metrics.jsonl").read_text() == "0\n1\n2\n3\n"
    assert list((tmp_path / "run-1").iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", ["gone", "changed", "missing"])
def test_a_damaged_checkpoint_is_passed_over_by_all_and_said_once(
    tmp_path: Path, scratch: Path, rank: int, damage: str
) -> None:
    memory = stored(tmp_path / "run", [2, 4])
    files = memory.held[4, rank][1]
    name = f"model-{rank}.safetensors"
    said = f"{name} of step 4 in memory: has changed since it was written"
    if damage == "gone":
        memory.lost.append((4, rank))
        said = f"step 4 in memory: the part of rank {rank} is gone"
    elif damage == "changed":
        files[name] = files[name][:-1] + b"x"
    else:
        del files[name]
    found, warned = fetched(memory, tmp_path / "run")
    assert [one.step for one in found] == [2, 2]
    assert len(list(scratch.iterdir())) == 1
    assert warned == [f"skipped a checkpoint in memory: {said}"]
    memory.held = {key: one for key, one in memory.held.items() if key[0] == 4}
    assert fetched(memory, tmp_path / "run")[0] == [None, None]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("every", "interval"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_two_parts_are_stored_in_the_steps_that_may_be_lost(tmp_path: Path, every: int, interval: int) -> None:
    strategy: Any = SimpleNamespace(rank=0, world_size=1)
    writer = MemoryWriter(Kept(), strategy, tmp_path, every, pytest.fail, "a")
    assert writer.interval == interval
    writer.close()


def test_storing_that_fails_works_and_fails_again_is_a_warning_each_time(tmp_path: Path) -> None:
    class Now(Kept):
        def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
            if part.step != 4:
                raise MemoryError(f"at step {part.step}")

    warned: list[str] = []
    strategy: Any = SimpleNamespace(rank=0, world_size=1)
    writer = MemoryWriter(Now(), strategy, tmp_path, 4, warned.append, "a")
    for step in (1, 2, 4, 6, 8):
        writer.begin(Snapshot(weights(0), [], ""), step)
        writer.wait()
    writer.close()
    assert [text.partition(": ")[2].partition(";")[0] for text in warned] == ["at step 1", "at step 6"]


@pytest.mark.long
def test_a_part_that_could_not_be_stored_takes_no_memory_afterwards(tmp_path: Path) -> None:
    """The error has its frames, and these have the files."""

    class Full(Kept):
        def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
            raise MemoryError

    strategy: Any = SimpleNamespace(rank=0, world_size=1)
    writer = MemoryWriter(Full(), strategy, tmp_path, 4, lambda text: None, "a")
    snapshot = Snapshot(weights(0), [], "")
    there = weakref.ref(snapshot)
    writer.begin(snapshot, 2)
    del snapshot
    writer.wait()
    gc.collect()
    assert there() is None
    writer.close()


def test_files_in_folders_within_folders_come_back(tmp_path: Path) -> None:
    """As the library of a strategy writes them."""
    (tmp_path / "run").mkdir()
    library = tmp_path / "library"
    (library / "shards" / "0").mkdir(parents=True)
    (library / "shards" / "0" / "zero.pt").write_bytes(b"moments")
    memory, strategy = Kept(), Group(1).rank(0)
    writer = MemoryWriter(memory, strategy, tmp_path / "run", 1, pytest.fail, "a")
    writer.begin(Snapshot({}, [], "", library=library), 3)
    writer.close()
    found = fetch_newest(memory, strategy, tmp_path / "run", after=0, warn=pytest.fail)
    assert found is not None
    assert found.files == ("deepspeed/shards/0/zero.pt",)
    assert (found.path / "deepspeed" / "shards" / "0" / "zero.pt").read_bytes() == b"moments"


def part(step: int, rank: int, *, attempt: str = "a", world: int = 2) -> MemoryPart:
    return MemoryPart(attempt, step, rank, world, {}, 0)


def test_a_checkpoint_is_whole_where_one_attempt_has_the_parts_of_all_ranks() -> None:
    parts = [
        *(part(2, 1), part(2, 0), part(4, 0), part(4, 1, attempt="b"), part(6, 1), part(6, 0)),
        *(part(8, 0, world=1, attempt="b"), part(9, 0)),
    ]
    assert [[(one.step, one.rank) for one in held] for held in whole(parts, after=0)] == [
        [(8, 0)],
        [(6, 0), (6, 1)],
        [(2, 0), (2, 1)],
    ]
    assert [held[0].step for held in whole(parts, after=2)] == [8, 6]


# --- who waits for whom -----------------------------------------------------------------------------------------------


def test_a_part_is_waited_for_where_no_step_may_be_lost(tmp_path: Path) -> None:
    kept = threading.Event()
    wanted = threading.Event()

    class Slow(Kept):
        def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
            assert "metrics.jsonl" not in files, "records are brought where somebody asks for them"
            assert wanted.wait(10)
            time.sleep(0.05)
            kept.set()

    strategy: Any = SimpleNamespace(rank=0, world_size=1)
    for every in (1, 2):
        kept.clear()
        (wanted.set if every == 1 else wanted.clear)()
        writer = MemoryWriter(Slow(), strategy, tmp_path, every, pytest.fail, "a")
        writer.begin(Snapshot(weights(0), [], ""), 4)
        assert kept.is_set() is (every == 1)
        wanted.set()
        writer.close()
        assert kept.is_set(), "what has begun is stored before the end"


@pytest.mark.parametrize(("there", "free", "in_memory"), [(True, 201, True), (True, 200, False), (False, 999, False)])
def test_what_fits_twice_is_written_in_memory(
    monkeypatch: pytest.MonkeyPatch, scratch: Path, there: bool, free: int, in_memory: bool
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(Path, "is_dir", lambda folder: there)
    assert _scratch_root(100) == (Path("/dev/shm") if in_memory else scratch)
