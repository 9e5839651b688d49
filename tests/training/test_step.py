"""A step does not wait for the device, and one whose numbers are not finite changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finray.errors import TrainingError
from finray.training import nonfinite as watch
from finray.training.assemble import Assembled
from finray.training.step import train_step
from tests.support import runs
from tests.support.checkpoints import reseal
from tests.support.group import run_group
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run()


# --- waiting ---------------------------------------------------------------------------------------------------------


class Readings(TorchDispatchMode):
    """Counts what would wait for a GPU: a number that is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += any(one in name for one in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default"))
        return func(*args, **(kwargs or {}))


@contextmanager
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    mode = Readings()
    with monkeypatch.context() as patch:
        real = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            mode.count += 1
            return real(tensor)

        patch.setattr(torch.Tensor, "tolist", tolist)
        with mode:
            yield mode


def readings_by_step(plain: Plain, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    loop = runs.assemble_alone(plain, run_dir).loop
    counts: list[int] = []
    with readings(monkeypatch) as mode:
        loop.profiler.before = lambda step: counts.append(mode.count)
        loop.run()
        counts.append(mode.count)
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("adamw", "fp32"), ("adamw", "fp16"), ("muon", "fp32"), ("adafactor", "fp32")]
)
def test_only_steps_with_a_record_read_from_the_device(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, precision: str
) -> None:
    seldom = changed(
        plain,
        {"train.optimizer": optimizer, "train.precision": precision},
        {"tracking.log_every": 4, "checkpoint.every_steps": 100},
        {"adapter.method": "none"} if optimizer != "adamw" else {},
    )
    found = readings_by_step(seldom, tmp_path / "seldom", monkeypatch)
    # The first step compares the head with the model's own.
    assert [found[step] for step in (1, 2, 4, 5, 6)] == [0] * 5
    assert found[3] > 0
    assert found[7] > 0


def test_the_count_sees_what_waits(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often = readings_by_step(plain, tmp_path / "often", monkeypatch)
    assert all(count > 0 for count in often)
    rare = {"tracking.log_every": 8, "checkpoint.every_steps": 100}
    eight = changed(plain, {"train.optimizer": "adamw_8bit"}, rare)
    assert all(count > 0 for count in readings_by_step(eight, tmp_path / "eight", monkeypatch))


# --- dropout ---------------------------------------------------------------------------------------------------------


def share(plain: Plain, run_dir: Path, *, rank: int, workers: int) -> tuple[float, dict[str, torch.Tensor]]:
    """What one of several workers adds to the loss and to the gradients of the first step."""
    loop = runs.assemble_alone(plain, run_dir).loop
    loop.task.model.train()
    with torch.no_grad():
        for name, one in loop.optimizer.parameters.items():
            # While it is zero, what is dropped before it does not reach the loss.
            one.add_(0.1 if "lora_B" in name else 0.0)
    data = replace(loop.source, rank=rank, world_size=workers).at(0)
    gradients: dict[str, torch.Tensor] = {}

    def keep(rate: float, **_: Any) -> None:
        found = {name: one.grad.clone() for name, one in loop.optimizer.parameters.items() if one.grad is not None}
        gradients.update(found)

    loop.optimizer.step = keep  # type: ignore[method-assign]
    settings = {"learning_rate": 0.1, "max_grad_norm": None}
    result = train_step(loop.task, loop.strategy, loop.optimizer, data, loop.state, loop._guard, **settings)
    loop.trackers.finish()
    return result.loss.item(), gradients


def test_dropout_belongs_to_a_micro_batch_and_not_to_the_worker(plain: Plain, tmp_path: Path) -> None:
    noisy = changed(plain, {"adapter.dropout": 0.3, "train.global_batch_size": 5})
    loss, gradients = share(noisy, tmp_path / "one", rank=0, workers=1)
    parts = [share(noisy, tmp_path / f"{rank}-of-3", rank=rank, workers=3) for rank in range(3)]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-6)
    for name, whole in gradients.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), whole, rtol=1e-4, atol=1e-6)
    other, _ = share(changed(noisy, {"adapter.dropout": 0.0}), tmp_path / "quiet", rank=0, workers=1)
    assert other != pytest.approx(loss, rel=1e-6), "the dropout must matter"


# --- numbers that are not finite -------------------------------------------------------------------------------------


def poisoned(plain: Plain, run_dir: Path, *, step: int, factor: float) -> Assembled:
    """A run whose loss is multiplied by something in one step."""
    assembled = runs.assemble_alone(plain, run_dir)
    loop = assembled.loop
    real = loop.task.outputs
    loop.task.outputs = lambda batch: real(batch) * (factor if loop.state.step + 1 == step else 1.0)  # type: ignore[method-assign]
    return assembled


def weights_of(assembled: Assembled) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in assembled.loop.task.layout.tensors().items()}


CONSTANT = {"train.schedule": "constant", "train.warmup_steps": 0}


@pytest.fixture(scope="module")
def steady(plain: Plain) -> Plain:
    return changed(plain, CONSTANT, {"train.max_steps": 4, "checkpoint.every_steps": 100})


@pytest.fixture(scope="module")
def good(steady: Plain, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[int]]:
    """Weights after two and after four steps, and the rows of the third."""
    folder = tmp_path_factory.mktemp("good")
    two = runs.run_alone(changed(steady, {"train.max_steps": 2}), folder / "two")
    four = runs.run_alone(steady, folder / "four")
    return weights_of(two), weights_of(four), runs.values(folder / "four", "samples")[2]


@pytest.mark.parametrize(("factor", "every"), [(float("nan"), 1), (float("inf"), 4)])
def test_a_bad_step_stops_the_run_and_changes_no_weight(
    steady: Plain, good: tuple[Any, Any, list[int]], tmp_path: Path, factor: float, every: int
) -> None:
    expected, later, samples = good
    steady = changed(steady, {"tracking.log_every": every})
    bad = poisoned(steady, tmp_path / "bad", step=3, factor=factor)
    with pytest.raises(TrainingError, match="at step 3; no weight was changed") as caught:
        bad.loop.run()
    assert str(caught.value.where).startswith("prepared rows ")
    assert set(str(caught.value.where).removeprefix("prepared rows ").split(", ")) <= {str(row) for row in samples}
    found = weights_of(bad)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Two more good steps do change them, and a bad one would, were it let through.
    assert not all(torch.equal(one, expected[name]) for name, one in later.items())
    let_through = poisoned(steady, tmp_path / "through", step=3, factor=factor)
    optimizer = let_through.loop.optimizer
    real = optimizer.step
    optimizer.step = lambda rate, found_inf=None: real(rate)  # type: ignore[method-assign]
    with pytest.raises(TrainingError):
        let_through.loop.run()
    assert not all(torch.equal(one, expected[name]) for name, one in weights_of(let_through).items())


# --- fp16 ------------------------------------------------------------------------------------------------------------


def fp16(plain: Plain, *changes: Mapping[str, Any]) -> Plain:
    return changed(plain, {"train.precision": "fp16"}, *changes)


def scales(run_dir: Path) -> list[tuple[float, int]]:
    return [(one["loss_scale"], one["skipped"]) for one in runs.records(run_dir)]


def test_gradients_too_large_for_fp16_leave_the_update_out(plain: Plain, tmp_path: Path) -> None:
    steady = fp16(plain, CONSTANT)
    assembled = runs.assemble_alone(steady, tmp_path / "run")
    assembled.loop._guard._scale.fill_(2.0**23)
    before = weights_of(assembled)
    seen: list[bool] = []
    real = assembled.loop._after_step

    def after(*args: Any, **more: Any) -> None:
        seen.append(all(torch.equal(one, before[name]) for name, one in weights_of(assembled).items()))
        real(*args, **more)

    assembled.loop._after_step = after  # type: ignore[method-assign]
    assembled.loop.run()
    found = scales(tmp_path / "run")
    left_out = found[-1][1]
    assert 2 <= left_out <= 7
    # The scale is halved in each of these steps; weights are as they were until one update is good.
    assert found[:left_out] == [(2.0 ** (22 - number), number + 1) for number in range(left_out)]
    assert found[-1][0] == 2.0 ** (23 - left_out)
    assert seen == [True] * left_out + [False] * (8 - left_out)
    norms = runs.values(tmp_path / "run", "grad_norm")
    assert [norm is None for norm in norms] == [True] * left_out + [False] * (8 - left_out)


def test_the_loss_scale_is_resumed(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GROWTH_STEPS", 3)
    runs.run_alone(fp16(plain), tmp_path / "whole")
    runs.run_alone(fp16(plain), runs.cut(tmp_path / "whole", tmp_path / "cut"))
    assert runs.trace(tmp_path / "cut") == runs.trace(tmp_path / "whole")
    assert scales(tmp_path / "cut") == scales(tmp_path / "whole")
    assert len(set(scales(tmp_path / "whole"))) >= 3
    state = json.loads((tmp_path / "whole" / "checkpoint-000004" / "training_state" / "state.json").read_text())
    assert (state["loss_scale"], state["good_steps"]) == (2 * watch.FIRST_SCALE, 1)


def test_ranks_leave_an_update_out_alike(plain: Plain, tmp_path: Path) -> None:
    hot = fp16(plain, CONSTANT, {"train.max_steps": 6, "checkpoint.every_steps": 1})
    runs.run_alone(hot, tmp_path / "one")
    runs.keep_until(tmp_path / "one", 1)
    checkpoint = tmp_path / "one" / "checkpoint-000001"
    path = checkpoint / "training_state" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "loss_scale": 2.0**21}))
    reseal(checkpoint)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    runs.run_alone(hot, tmp_path / "one")
    run_group(hot, tmp_path / "two", world_size=2)
    assert scales(tmp_path / "two") == scales(tmp_path / "one")
    assert 1 <= scales(tmp_path / "two")[-1][1] <= 4
    assert runs.values(tmp_path / "two", "loss") == pytest.approx(runs.values(tmp_path / "one", "loss"), rel=5e-3)
