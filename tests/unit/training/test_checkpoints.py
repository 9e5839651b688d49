"""What each rank writes of a checkpoint, how it becomes one, and what several ranks do where one of them fails."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finray.checkpoint import Checkpoint, CheckpointStore, manifest
from finray.checkpoint.pieces import PieceReader
from finray.config.schema import CheckpointConfig
from finray.errors import CheckpointError, ModelError, StorageError
from finray.sharding import FlatShard
from finray.training.checkpointing import (
    CheckpointWriter,
    Saved,
    Snapshot,
    open_store,
    ranks_here,
    restore,
    take_snapshot,
)
from finray.training.state import TrainState
from tests.support.ranks import Group

SIZES = {"a": 4, "b": 3, "c": 3, "d": 2, "e": 9}
# The largest are given out as they come: each to the rank with the least so far, the first of equal ones.
OWNERS = {
    1: dict.fromkeys(SIZES, 0),
    2: {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0},
    3: {"a": 0, "b": 1, "c": 2, "d": 1, "e": 2},
    9: {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4},
}


class Layout:
    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.held = {name: torch.full((size, 2), float(size)) for name, size in SIZES.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.held

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"x.{name}": tensor for name, tensor in tensors.items()}

    def save_settings(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


def optimizer(rank: int) -> Any:
    """Moments as plain tensors, one of them empty, and as a part of a flat vector."""
    state: dict[str, Any] = {f"{name}/m": torch.full((size,), size + 0.5) for name, size in SIZES.items()}
    state |= {"a/step": torch.tensor(3.0), "none/m": torch.empty(0, 4)}
    start, stop = [(0, 5), (5, 5), (5, 12)][rank % 3]
    state["flat/m"] = FlatShard(torch.arange(start, stop).float(), start, (3, 4))
    return SimpleNamespace(sharded_state=lambda: state)


def snapshots(layout: Layout, world: int, *buffers: dict[str, torch.Tensor]) -> list[Snapshot]:
    def of(rank: int) -> Snapshot:
        strategy: Any = SimpleNamespace(rank=rank, world_size=world)
        own = buffers[rank] if buffers else None
        others = lambda folder: (folder / "tokenizer.json").write_text(str(rank))  # noqa: E731
        return take_snapshot(layout, optimizer(rank), TrainState(step=7), strategy, others=others, buffers=own)  # type: ignore[arg-type]

    return [of(rank) for rank in range(world)]


def write_all(found: list[Snapshot], folder: Path) -> None:
    folder.mkdir()
    for one in found:
        one.write(folder)


@pytest.mark.parametrize("stem", ["model", "adapter_model"])
@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_every_weight_is_written_once_and_by_the_rank_with_the_least(tmp_path: Path, stem: str, world: int) -> None:
    layout = Layout(stem)
    write_all(snapshots(layout, world), tmp_path / "c")
    owners = OWNERS[world if stem == "model" else 1]
    writers = max(owners.values()) + 1
    names = [f"{stem}-{rank + 1:05d}-of-{writers:05d}.safetensors" for rank in range(writers)]
    names = [f"{stem}.safetensors"] if writers == 1 else names
    assert sorted(path.name for path in (tmp_path / "c").glob("*.safetensors")) == names
    for rank, name in enumerate(names):
        found = load_file(tmp_path / "c" / name)
        assert set(found) == {f"x.{one}" for one, owner in owners.items() if owner == rank}
        assert all(torch.equal(found[f"x.{one}"], layout.held[one]) for one, owner in owners.items() if owner == rank)
    index = tmp_path / "c" / f"{stem}.safetensors.index.json"
    assert index.exists() is (writers > 1)
    if writers > 1:
        total = sum(SIZES.values()) * 2 * 4
        assert json.loads(index.read_text()) == {
            "metadata": {"total_size": total},
            "weight_map": {one: names[owner] for one, owner in owners.items()},
        }
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "0"
    assert (tmp_path / "c" / "config.json").exists()
    assert TrainState.load(tmp_path / "c") == TrainState(step=7)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("behind", [True, False])
def test_moments_are_whole_whoever_writes_them(tmp_path: Path, world: int, behind: bool) -> None:
    found = snapshots(Layout("model"), world, *([{} for _ in range(world)] if behind else []))
    written = [piece.name for one in found for piece in one.moments]
    assert sorted(name for name in written if name != "flat/m") == sorted(
        [*(f"{name}/m" for name in SIZES), "a/step", "none/m"]
    )
    # A rank that holds no element of a vector writes nothing of it.
    assert written.count("flat/m") == (2 if world == 3 else 1)
    if world < 3:
        return
    write_all(found, tmp_path / "c")
    folder = tmp_path / "c" / "training_state"
    reader = PieceReader(folder, "optimizer", [path.name for path in folder.iterdir()])
    assert torch.equal(reader.read("flat/m"), torch.arange(12).float().reshape(3, 4))
    assert reader.read("e/m").tolist() == [9.5] * 9
    assert float(reader.read("a/step")) == 3.0
    assert reader.shapes["none/m"] == (0, 4)


def test_a_rank_without_moments_writes_no_file_of_them_but_the_first(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        texts = {"training_state/state.json": "{}"} if rank == 0 else {}
        Snapshot({}, [], f"optimizer-{rank}.safetensors", texts).write(tmp_path / str(rank))
    assert (tmp_path / "0" / "training_state" / "optimizer-0.safetensors").exists()
    assert list((tmp_path / "1" / "training_state").iterdir()) == []


def test_copies_are_made_into_the_same_memory_each_time_and_stay_as_they_were() -> None:
    layout, buffers = Layout("model"), dict[str, torch.Tensor]()
    layout.held["a"] = torch.full((2, 4), 4.0).T.requires_grad_()
    (first,) = snapshots(layout, 1, buffers)
    with torch.no_grad():
        layout.held["a"].add_(1)
    (own,) = first.weights.values()
    assert own["x.a"].unique().tolist() == [4.0]
    assert own["x.a"].is_contiguous()
    assert not own["x.a"].requires_grad
    (again,) = snapshots(layout, 1, buffers)
    (other,) = again.weights.values()
    assert other["x.a"].unique().tolist() == [5.0]
    assert other["x.a"].data_ptr() == own["x.a"].data_ptr()


# --- writing ----------------------------------------------------------------------------------------------------------


def snapshot_of(rank: int, fails: bool = False) -> Snapshot:
    def others(folder: Path) -> None:
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    return Snapshot({f"part-{rank}.safetensors": {"w": torch.full((3,), float(rank))}}, [], "", others=others)


def saved(
    tmp_path: Path,
    steps: list[int],
    *,
    world: int = 3,
    fails: int | None = None,
    losses: dict[int, float] | None = None,
    **config: Any,
) -> list[Any]:
    """Every rank writes checkpoints of these steps; what came of the last one."""
    settings = CheckpointConfig(**{"keep_last": 9, "keep_best": False, **config})

    def run(strategy: Any) -> Any:
        writer = CheckpointWriter(CheckpointStore(tmp_path), strategy, settings, best=("loss", "min"))
        assert writer.finish() is None
        assert not writer.is_done
        found = None
        try:
            for step in steps:
                metrics = {} if losses is None else {"loss": losses[step]}
                writer.begin(snapshot_of(strategy.rank, fails == strategy.rank), step=step, metrics=metrics)
                found = writer.finish()
                assert writer.finish() is None
        finally:
            writer.close()
        return found

    return Group(world).run(run)


def test_no_checkpoint_is_committed_while_the_records_before_it_are_not_on_disk(tmp_path: Path) -> None:
    def refuse() -> None:
        raise CheckpointError("the run's records could not be written")

    def run(strategy: Any) -> Any:
        before = refuse if strategy.rank == 0 else lambda: pytest.fail("the first rank has the records")
        store = CheckpointStore(tmp_path)
        writer = CheckpointWriter(store, strategy, CheckpointConfig(), best=("loss", "min"), before=before)
        try:
            writer.begin(snapshot_of(strategy.rank), step=4, metrics={})
            return writer.finish()
        finally:
            writer.close()

    found = Group(2).run(run)
    assert [(type(one), str(one)) for one in found] == [(CheckpointError, "the run's records could not be written")] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_holds_the_files_of_all_ranks_and_its_metrics(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-000004"
    assert saved(tmp_path, [4], losses={4: 0.5}) == [Saved(target, 4, {"loss": 0.5})] * 3
    content = manifest.verify(target)
    assert [one["path"] for one in content["files"]] == [f"part-{rank}.safetensors" for rank in range(3)]
    assert (content["step"], content["metrics"]) == (4, {"loss": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000004"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    for config, kept in (({"keep_last": 1, "keep_best": True}, [2, 4]), ({"keep_last": 2}, [3, 4])):
        folder = tmp_path / str(kept[0])
        folder.mkdir()
        saved(folder, [1, 2, 3, 4], world=1, losses=losses, **config)
        assert CheckpointStore(folder).steps() == kept


@pytest.mark.parametrize("fails", [0, 2])
def test_where_one_rank_cannot_write_all_fail_and_nothing_is_left(tmp_path: Path, fails: int) -> None:
    found = saved(tmp_path, [4], fails=fails)
    assert all(isinstance(one, CheckpointError) and "no space left" in str(one).lower() for one in found)
    assert list(tmp_path.iterdir()) == []


def test_where_the_checkpoint_cannot_be_made_all_fail_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("another process has taken over this run")

    monkeypatch.setattr(CheckpointStore, "commit", fails)
    found = saved(tmp_path, [4])
    assert all(isinstance(one, CheckpointError) and "taken over this run" in str(one) for one in found)
    assert list(tmp_path.iterdir()) == []


# --- whose a run is ---------------------------------------------------------------------------------------------------


def test_the_first_rank_takes_a_run_over_from_an_earlier_start(tmp_path: Path) -> None:
    strategies: list[Any] = [SimpleNamespace(rank=rank, all_gather_object=lambda one: [one]) for rank in (0, 1)]
    earlier = open_store(tmp_path, None, strategies[0])
    open_store(tmp_path, None, strategies[1])
    earlier.commit(earlier.begin(1), 1, [], metrics={})
    open_store(tmp_path, None, strategies[0])
    with pytest.raises(CheckpointError, match="another process has taken over this run"):
        earlier.commit(earlier.begin(2), 2, [], metrics={})


def test_ranks_that_see_each_others_files_are_known_and_leave_none(tmp_path: Path) -> None:
    """This is rank 1 of four, and rank 3 sees the same disk."""
    folder, seen, names = tmp_path / "run", list[list[str]](), list[str]()

    def broadcast(name: str) -> str:
        names.append(name)
        return name

    def gather(value: Any) -> list[Any]:
        seen.append(sorted(path.name for path in folder.iterdir()))
        if len(seen) == 1:
            (folder / f"{names[0]}-3").mkdir()
        return [value] * 4

    strategy: Any = SimpleNamespace(rank=1, world_size=4, broadcast_object=broadcast, all_gather_object=gather)
    assert ranks_here(strategy, folder) == [1, 3]
    # Its own mark is there before the others look, and until they have.
    assert seen == [[f"{names[0]}-1"], [f"{names[0]}-1", f"{names[0]}-3"]]
    assert [path.name for path in folder.iterdir()] == [f"{names[0]}-3"]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_weights_of_another_model_are_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "training_state").mkdir()
    (tmp_path / "training_state" / "state.json").write_text(TrainState(step=3).text())
    asked: list[Any] = []

    def load(folder: Path, files: Any) -> None:
        asked.append((folder, files))
        raise ModelError("of another model", where="here", repair="name it")

    layout: Any = SimpleNamespace(load=load)
    found = Checkpoint(tmp_path, 3, ("model.safetensors",))
    with pytest.raises(CheckpointError, match="of another model") as caught:
        restore(found, layout, SimpleNamespace())  # type: ignore[arg-type]
    assert (caught.value.where, caught.value.repair) == ("here", "name it")
    assert asked == [(tmp_path, ("model.safetensors",))]


# --- what comes later -------------------------------------------------------------------------------------------------


def test_later_metrics_choose_the_best_and_what_is_in_use_stays_until_it_is_used_no_more(tmp_path: Path) -> None:
    """The first rank alone writes them; step 2 turns out to be the best."""
    settings = CheckpointConfig(keep_last=1, keep_best=True)
    kept: dict[str, list[int]] = {}

    def run(strategy: Any) -> Any:
        in_use = [1, 2, 3]
        writer = CheckpointWriter(CheckpointStore(tmp_path), strategy, settings, best=("loss", "min"), in_use=in_use)
        for step in (1, 2, 3, 4):
            writer.begin(snapshot_of(strategy.rank), step=step, metrics={"a": 1.0})
            writer.finish()
        for step, loss, name in ((1, 3.0, "first"), (2, 2.0, "second"), (3, 2.5, "third")):
            in_use.remove(step)
            writer.add_metrics(step, {"loss": loss})
            if strategy.rank == 0:
                kept[name] = CheckpointStore(tmp_path).steps()
        writer.close()

    assert Group(2).run(run) == [None, None]
    # The first is the best of all until the second is known.
    assert kept == {"first": [1, 2, 3, 4], "second": [2, 3, 4], "third": [2, 4]}
    assert CheckpointStore(tmp_path).content(2)["metrics"] == {"a": 1.0, "loss": 2.0}


def test_a_part_is_done_when_it_is_written_and_before_it_is_a_checkpoint(tmp_path: Path) -> None:
    wanted, strategy = threading.Event(), Group(1).rank(0)
    strategy.save_library_checkpoint = lambda folder: (folder.mkdir(), (folder / "zero.pt").touch()) and True
    writer = CheckpointWriter(CheckpointStore(tmp_path), strategy, CheckpointConfig(), best=("loss", "min"))
    writer.begin(Snapshot({}, [], "", others=lambda folder: wanted.wait(10) and None), step=4, metrics={})
    assert not writer.is_done
    wanted.set()
    assert writer._pending is not None
    writer._pending[1].result(timeout=10)
    assert writer.is_done
    assert CheckpointStore(tmp_path).steps() == []
    assert writer.finish() is not None
    assert not writer.is_done
    # What the strategy's library wrote lies in its own folder.
    assert (tmp_path / "checkpoint-000004" / "deepspeed" / "zero.pt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000004"]
    writer.close()


def test_records_that_cannot_be_brought_to_a_url_end_no_run(tmp_path: Path) -> None:
    errors: list[Exception] = [StorageError("away"), CheckpointError("overtaken"), ZeroDivisionError()]

    def follow() -> None:
        raise errors.pop(0)

    store: Any = SimpleNamespace(sync_records=follow)
    writer = CheckpointWriter(store, Group(1).rank(0), CheckpointConfig(), best=("loss", "min"))
    writer.sync_records()
    writer.sync_records()
    with pytest.raises(ZeroDivisionError):
        writer.sync_records()
    writer.close()
