"""Checkpoints in memory with ranks as threads: which is fetched, what of it is refused, what is left on the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.checkpoint import Checkpoint
from finray.training import memory as module
from finray.training.checkpointing import Snapshot
from finray.training.memory import MemoryWriter, Part, _scratch_root, fetch_newest, whole
from tests.support.ranks import Group


class Kept:
    """Keeps parts in this process."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], tuple[Part, dict[str, bytes]]] = {}
        self.lost: list[tuple[int, int]] = []

    def put(self, part: Part, files: Mapping[str, bytes]) -> None:
        self.held[part.step, part.rank] = part, dict(files)

    def parts(self) -> Sequence[Part]:
        return [part for part, _ in self.held.values()]

    def get(self, part: Part) -> Mapping[str, bytes] | None:
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


def test_a_part_says_what_it_holds_and_only_the_first_rank_brings_the_records(tmp_path: Path) -> None:
    memory = stored(tmp_path / "run", [4])
    for rank in range(2):
        part, files = memory.held[4, rank]
        assert (part.attempt, part.step, part.rank, part.world_size) == ("attempt", 4, rank, 2)
        assert part.digests.keys() == files.keys()
        assert ("metrics.jsonl" in files) == (rank == 0)
        assert part.size == sum(len(one) for name, one in files.items() if name != "metrics.jsonl")


@pytest.mark.parametrize(("every", "interval"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_two_parts_are_stored_in_the_steps_that_may_be_lost(tmp_path: Path, every: int, interval: int) -> None:
    strategy: Any = SimpleNamespace(rank=0, world_size=1)
    writer = MemoryWriter(Kept(), strategy, tmp_path, every, pytest.fail, "a")
    assert writer.interval == interval
    writer.close()


def test_what_cannot_be_stored_is_a_warning_once(tmp_path: Path) -> None:
    class Full(Kept):
        def put(self, part: Part, files: Mapping[str, bytes]) -> None:
            raise MemoryError

    warned: list[str] = []
    strategy: Any = SimpleNamespace(rank=0, world_size=1, all_gather_object=lambda value: [value])
    writer = MemoryWriter(Full(), strategy, tmp_path, 4, warned.append, "a")
    for step in (2, 4):
        writer.begin(Snapshot(weights(0), [], ""), step)
        writer.ready()
    writer.close()
    (said,) = warned
    assert said.startswith("a checkpoint is not in memory as it should be: MemoryError; ")


def part(step: int, rank: int, *, attempt: str = "a", world: int = 2) -> Part:
    return Part(attempt, step, rank, world, {}, 0)


def test_a_checkpoint_is_whole_where_one_attempt_has_the_parts_of_all_ranks() -> None:
    parts = [
        *(part(2, 1), part(2, 0), part(4, 0), part(4, 1, attempt="b"), part(6, 1), part(6, 0)),
        *(part(8, 0, world=1, attempt="b"), part(9, 0)),
    ]
    assert [[(one.step, one.rank) for one in held] for held in whole(parts)] == [
        [(8, 0)],
        [(6, 0), (6, 1)],
        [(2, 0), (2, 1)],
    ]
    assert [held[0].step for held in whole(parts, after=2)] == [8, 6]


# --- who waits for whom -----------------------------------------------------------------------------------------------


def test_no_rank_goes_on_before_all_have_cleaned_up(tmp_path: Path, scratch: Path) -> None:
    """Directories that lie there whenever the ranks wait for each other; the newest checkpoint is not whole."""
    memory = stored(tmp_path / "run", [2, 4])
    memory.lost.append((4, 1))
    (scratch / f"{module._prefix(tmp_path / 'run')}rest").mkdir()
    seen: list[int] = []

    def gather(value: Any) -> list[Any]:
        seen.append(len(list(scratch.iterdir())))
        return [value, None]

    strategy: Any = SimpleNamespace(
        rank=0, world_size=2, all_gather_object=gather, broadcast_object=lambda value: value
    )
    found = fetch_newest(memory, strategy, tmp_path / "run", after=0, warn=lambda text: None)
    assert found is not None
    assert found.step == 2
    # Of each: before the directory is made, twice while it is seen who shares it, and once all have filled it.
    one, damaged = [0, 1, 1, 1], [0]
    assert seen == [0, *one, *damaged, *one]


def test_a_part_is_waited_for_where_no_step_may_be_lost(tmp_path: Path) -> None:
    kept = threading.Event()
    wanted = threading.Event()

    class Slow(Kept):
        def put(self, part: Part, files: Mapping[str, bytes]) -> None:
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
