"""Checkpoints written in the background: what they hold, and what a failed write does."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finray.checkpoint import CheckpointStore
from finray.config.schema import CheckpointConfig
from finray.errors import CheckpointError
from finray.training.assemble import Assembled
from finray.training.checkpointing import CheckpointWriter, Snapshot, take_snapshot
from finray.training.loop import Loop
from tests.support import runs
from tests.support.runs import Plain, changed


class HeldStore(CheckpointStore):
    """Writes only when it is let go."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.go = Event()

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[dict[str, Any]]:
        assert self.go.wait(60)
        return super().fill(scratch, step, fill)


class FullStore(CheckpointStore):
    """Storage that is full from the second checkpoint on."""

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[dict[str, Any]]:
        def full(folder: Path) -> None:
            fill(folder)
            if step > 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        return super().fill(scratch, step, full)


@pytest.fixture
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run({"adapter.method": "none", "train.max_steps": 6, "checkpoint.every_steps": 2}, rows=20)


@pytest.fixture
def assembled(plain: Plain, tmp_path: Path) -> Iterator[Assembled]:
    found = runs.assemble_alone(plain, tmp_path / "run")
    yield found
    found.loop.writer.close()
    found.loop.trackers.finish()


def put_store(loop: Loop, store: CheckpointStore) -> None:
    loop.writer.close()
    settings = CheckpointConfig(every_steps=2, keep_last=10)
    loop.writer = CheckpointWriter(store, loop.strategy, settings, best=("eval_loss", "min"))


def snapshot(loop: Loop, buffers: dict[str, torch.Tensor] | None) -> Snapshot:
    layout = loop.task.layout
    return take_snapshot(layout, loop.optimizer, loop.state, loop.strategy, others=lambda folder: None, buffers=buffers)


def held(loop: Loop) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a run: weights, moments and counts."""
    return {**loop.task.layout.tensors(), **loop.optimizer.sharded_state()}


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The same in its files."""
    state = "training_state/optimizer-00001-of-00001.safetensors"
    return {**load_file(path / "model.safetensors"), **load_file(path / state)}


@pytest.mark.parametrize("copied", [True, False], ids=["from a copy", "control: without one"])
def test_what_changes_during_the_write_does_not_reach_the_file(
    assembled: Assembled, tmp_path: Path, copied: bool
) -> None:
    """Weights, moments and counts of updates alike."""
    loop, store = assembled.loop, HeldStore(tmp_path / "run")
    put_store(loop, store)
    for parameter in loop.optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step(0.1)
    before = {name: tensor.detach().clone() for name, tensor in held(loop).items()}
    loop.writer.begin(snapshot(loop, {} if copied else None), step=1, metrics={})
    with torch.no_grad():
        for tensor in held(loop).values():
            tensor.add_(1.0)
    assert not loop.writer.is_done
    store.go.set()
    saved = loop.writer.finish()
    assert saved is not None
    found = stored(saved.path)
    kinds = {name.rpartition("/")[2] for name in found if "/" in name}
    assert kinds == {"exp_avg", "exp_avg_sq", "step"}
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name]) is copied, name


def test_training_goes_on_while_a_checkpoint_is_written(assembled: Assembled, tmp_path: Path) -> None:
    """The write of step 2 ends when step 4 is done; nothing but the next save may wait for it."""
    loop, store = assembled.loop, HeldStore(tmp_path / "run")
    put_store(loop, store)
    steps: list[int] = []
    original = loop.state.advance

    def advance(**counts: int) -> None:
        original(**counts)
        steps.append(loop.state.step)
        if loop.state.step == 4:
            assert not (tmp_path / "run" / "checkpoint-000002").exists()
            store.go.set()

    loop.state.advance = advance  # type: ignore[method-assign]
    loop.run()
    assert steps == [1, 2, 3, 4, 5, 6]
    assert CheckpointStore(tmp_path / "run").steps() == [2, 4, 6]


@pytest.mark.parametrize("behind", [True, False])
def test_a_save_is_waited_for_where_it_is_not_asynchronous(plain: Plain, tmp_path: Path, behind: bool) -> None:
    """A write that takes its time: when the next step begins, only one behind the training may not be done."""
    found = runs.assemble_alone(changed(plain, {"checkpoint.asynchronous": behind}), tmp_path / "run")
    loop, began = found.loop, Event()
    there: dict[int, list[int]] = {}

    class SlowStore(CheckpointStore):
        def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[Any]:
            began.wait(60 if behind else 0.2)
            return super().fill(scratch, step, fill)

    put_store(loop, SlowStore(tmp_path / "run"))

    def before(step: int) -> None:
        there[step] = CheckpointStore(tmp_path / "run").steps()
        if step == 4:
            began.set()

    loop.profiler.before = before  # type: ignore[method-assign]
    loop.run()
    found.loop.trackers.finish()
    assert there[3] == ([] if behind else [2])
    # The last one is waited for in any case.
    assert CheckpointStore(tmp_path / "run").steps() == [2, 4, 6]


def test_a_failed_write_is_reported_and_the_checkpoint_before_stands(plain: Plain, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    found = runs.assemble_alone(plain, run_dir)
    put_store(found.loop, FullStore(run_dir))
    with pytest.raises(CheckpointError, match="no space left"):
        found.loop.run()
    found.loop.trackers.finish()
    kept = CheckpointStore(run_dir).latest(pytest.fail)
    assert kept is not None
    assert kept.step == 2
    assert not list(run_dir.glob(".tmp-*"))
    # With room again, the run continues from there to the same end.
    again = runs.run_alone(plain, run_dir)
    assert again.loop.state.step == 6
