"""Checkpoints in memory, between those on storage: preferred where they are newer and whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from finray.records import Note, Record, TrainRecord
from finray.runtime.memory_actors import STEPS, CheckpointMemoryActor
from finray.training import memory as memories
from finray.training.memory import MemoryPart
from tests.support import runs


class Kept:
    """Keeps parts in this process."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int, int], tuple[MemoryPart, dict[str, bytes]]] = {}

    def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
        self.held[part.attempt, part.step, part.rank] = part, dict(files)

    def parts(self) -> Sequence[MemoryPart]:
        return [part for part, _ in self.held.values()]

    def get(self, part: MemoryPart) -> Mapping[str, bytes] | None:
        found = self.held.get((part.attempt, part.step, part.rank))
        return None if found is None else found[1]


class Lazy:
    """A thread that works only while it is waited for."""

    def __init__(self, **_: object) -> None: ...

    def submit(self, function: Callable[..., None], *given: object) -> SimpleNamespace:
        return SimpleNamespace(result=partial(function, *given))

    def shutdown(self, **_: object) -> None: ...


class Killed(BaseException):
    """Stands for a kill; what a tracker raises else is caught."""


@pytest.fixture
def plain(tiny_run: Callable[..., runs.Plain], dropout_model: Path) -> runs.Plain:
    """Eight steps, stored after the fourth before the fifth begins, in memory after every second."""
    changes = {"adapter.dropout": 0.2, "checkpoint": {"every_steps": 4, "in_memory_every": 4, "asynchronous": False}}
    return tiny_run(changes, model=dropout_model)


def killed_at(plain: runs.Plain, run_dir: Path, step: int, memory: Kept) -> None:
    """Train with a memory, and end without a word at a step."""

    def notify(record: Record) -> None:
        if record.step > step and not isinstance(record, Note):
            raise Killed

    with pytest.raises(Killed):
        runs.run_alone(plain, run_dir, memory=memory, notify=notify)


def test_any_run_removes_what_killed_workers_left_in_memory(
    plain: runs.Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left := tmp_path / "shm" / f"{memories._prefix(tmp_path / 'other')}rest").mkdir(parents=True)
    os.utime(left, (0, 0))
    monkeypatch.setattr(memories, "_scratch_root", lambda size: left.parent)
    runs.assemble_alone(runs.changed(plain, {"checkpoint.in_memory_every": None}), tmp_path / "run")
    assert not left.exists()


def test_a_run_goes_on_from_memory_as_if_nothing_had_been(
    plain: runs.Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "shm").mkdir()
    monkeypatch.setattr(memories, "_scratch_root", lambda size: scratch)
    memory, told = Kept(), list[Record]()
    runs.run_alone(plain, tmp_path / "undisturbed")
    killed_at(plain, tmp_path / "run", 7, memory)
    # What is stored is not kept in memory, too.
    assert [part.step for part in memory.parts()] == [2, 6]
    loop = runs.run_alone(plain, tmp_path / "run", memory=memory, notify=told.append).loop
    assert loop.first_step == 7
    assert list(scratch.iterdir()) == [], "what came out of memory was a copy"
    assert [one.message for one in told if isinstance(one, Note) and "cluster's memory" in one.message] == [
        "loaded the checkpoint of step 6 from the cluster's memory"
    ]
    assert runs.trace(tmp_path / "run") == runs.trace(tmp_path / "undisturbed")
    for name in ("adapter_model.safetensors", "training_state/optimizer-00001-of-00001.safetensors"):
        one, other = (tmp_path / run / "checkpoint-000008" / name for run in ("run", "undisturbed"))
        assert one.read_bytes() == other.read_bytes()
    # Negative control: without a memory it continues from what is stored.
    runs.keep_until(tmp_path / "run", 4)
    assert runs.assemble_alone(plain, tmp_path / "run").loop.state.step == 4


@pytest.mark.parametrize(("every", "asynchronous"), [(1, True), (2, False), (5, True)])
def test_no_more_steps_than_were_said_are_without_a_checkpoint(
    plain: runs.Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, asynchronous: bool
) -> None:
    """However long a part is on its way: here each comes where it shall when it is waited for, and no sooner."""
    monkeypatch.setattr(memories, "ThreadPoolExecutor", Lazy)
    memory, without = Kept(), list[int]()

    def notify(record: Record) -> None:
        if isinstance(record, TrainRecord):
            without.append(record.step - max((part.step for part in memory.parts()), default=0))

    changes = {"train.max_steps": 12, "checkpoint": {"every_steps": 100, "in_memory_every": every}}
    changes |= {"checkpoint.asynchronous": asynchronous}
    runs.run_alone(runs.changed(plain, changes), tmp_path / "run", memory=memory, notify=notify)
    assert len(without) == 12
    assert max(without) == every - (every % 2 and every > 1)


def test_what_is_stored_behind_the_training_is_kept_in_memory_too(plain: runs.Plain, tmp_path: Path) -> None:
    memory = Kept()
    behind = runs.changed(plain, {"checkpoint.asynchronous": True})
    runs.run_alone(behind, tmp_path / "run", memory=memory)
    assert [part.step for part in memory.parts()] == [2, 4, 6]


def test_what_is_stored_is_taken_where_it_is_newer(plain: runs.Plain, tmp_path: Path) -> None:
    memory = Kept()
    killed_at(plain, tmp_path / "run", 5, memory)
    assert [part.step for part in memory.parts()] == [2]
    assert runs.assemble_alone(plain, tmp_path / "run", memory=memory).loop.state.step == 4


def test_what_is_damaged_or_gone_is_passed_over_in_memory_and_on_storage(plain: runs.Plain, tmp_path: Path) -> None:
    memory, told = Kept(), list[Record]()
    often = runs.changed(plain, {"train.max_steps": 10})
    killed_at(often, tmp_path / "run", 9, memory)
    assert [part.step for part in memory.parts()] == [2, 6]

    def goes_on() -> int:
        return runs.assemble_alone(often, tmp_path / "run", memory=memory, notify=told.append).loop.state.step

    # Of step 8 on storage something is damaged: what is in memory is newer than what is left there.
    runs.flip(tmp_path / "run" / "checkpoint-000008" / "adapter_model.safetensors")
    assert goes_on() == 6
    # A part that nobody has any more.
    memory.get = lambda part: None  # type: ignore[method-assign]
    told.clear()
    assert goes_on() == 4
    (warning,) = (one.message for one in told if isinstance(one, Note) and one.level == "warning")
    assert "skipped a checkpoint in memory" in warning
    assert "rank 0 is gone" in warning


def test_a_keeper_keeps_the_newest_steps_and_forgets_what_is_done_again() -> None:
    keeper = CheckpointMemoryActor()

    def put(attempt: str, step: int, rank: int = 0) -> None:
        keeper.put({"attempt": attempt, "step": step, "rank": rank}, {"file": f"{attempt}{step}{rank}".encode()})

    def held() -> list[tuple[str, int, int]]:
        return sorted((one["attempt"], one["step"], one["rank"]) for one in keeper.headers())

    for step in (2, 4, 6):
        for rank in (0, 1):
            put("a", step, rank)
    assert STEPS == 2
    assert held() == [("a", 4, 0), ("a", 4, 1), ("a", 6, 0), ("a", 6, 1)]
    assert keeper.get(("a", 4, 1)) == {"file": b"a41"}
    assert keeper.get(("a", 2, 1)) is None
    # From step 4 on, another attempt does them again.
    put("b", 6)
    assert held() == [("a", 4, 0), ("a", 4, 1), ("b", 6, 0)]
    put("b", 3)
    assert held() == [("b", 3, 0), ("b", 6, 0)]
