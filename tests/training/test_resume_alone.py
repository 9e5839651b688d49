"""Resuming is bitwise, and each part of the saved state is needed for that (one process, no Ray)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finray.errors import ConfigError
from finray.records import Note
from tests.support import runs
from tests.support.checkpoints import reseal
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    return tiny_run({"adapter.dropout": 0.2}, model=dropout_model)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    runs.run_alone(plain, run_dir)
    return run_dir


def change_counter(**values: Any) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / "training_state" / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def change_moments(kind: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / "training_state" / "optimizer-00001-of-00001.safetensors"
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        changed = {name: value * 0 if name.endswith(kind) else value for name, value in load_file(path).items()}
        save_file(changed, path, metadata=metadata)

    return change


def forget_moments(checkpoint: Path) -> None:
    save_file({}, checkpoint / "training_state" / "optimizer-00001-of-00001.safetensors")


def test_dropout_is_on(undisturbed: Path, plain: Plain, tmp_path: Path) -> None:
    runs.run_alone(changed(plain, {"adapter.dropout": 0.0}), tmp_path / "quiet")
    assert runs.values(tmp_path / "quiet", "samples") == runs.values(undisturbed, "samples")
    assert runs.values(tmp_path / "quiet", "loss") != runs.values(undisturbed, "loss")


def test_a_resumed_run_is_the_undisturbed_run_to_the_bit(undisturbed: Path, plain: Plain, tmp_path: Path) -> None:
    run_dir = runs.cut(undisturbed, tmp_path / "run")
    assembled = runs.run_alone(plain, run_dir)
    assert assembled.header.step == 4
    assert runs.trace(run_dir) == runs.trace(undisturbed)
    last = "checkpoint-000008"
    for name in ("adapter_model.safetensors", "training_state/optimizer-00001-of-00001.safetensors"):
        assert (run_dir / last / name).read_bytes() == (undisturbed / last / name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change_counter(position=0), id="cursor"),
        pytest.param(change_counter(random_key=1), id="random key"),
        pytest.param(change_moments("exp_avg"), id="first moments"),
        pytest.param(change_moments("exp_avg_sq"), id="second moments"),
        pytest.param(change_moments("/step"), id="update counts"),
        pytest.param(forget_moments, id="optimizer"),
    ],
)
def test_without_any_one_part_of_the_state_it_is_another_run(
    undisturbed: Path, plain: Plain, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Negative controls: the comparison above sees each part missing."""
    run_dir = runs.cut(undisturbed, tmp_path / "run")
    change(run_dir / "checkpoint-000004")
    reseal(run_dir / "checkpoint-000004")
    runs.run_alone(plain, run_dir)
    assert runs.trace(run_dir)[:4] == runs.trace(undisturbed)[:4]
    assert runs.trace(run_dir) != runs.trace(undisturbed)


def test_records_of_steps_that_are_done_again_are_replaced(undisturbed: Path, plain: Plain, tmp_path: Path) -> None:
    run_dir = runs.cut(undisturbed, tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "step": 7, "lo')
    runs.run_alone(plain, run_dir)
    assert runs.values(run_dir, "step") == list(range(1, 9))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_all_weights_resume_to_the_bit_with_every_optimizer(plain: Plain, tmp_path: Path, optimizer: str) -> None:
    full = changed(plain, {"adapter.method": "none", "train": {"learning_rate": 0.002, "optimizer": optimizer}})
    runs.run_alone(full, tmp_path / "whole")
    run_dir = runs.cut(tmp_path / "whole", tmp_path / "cut")
    runs.run_alone(full, run_dir)
    assert runs.trace(run_dir) == runs.trace(tmp_path / "whole")
    assert runs.values(run_dir, "loss")[-1] < runs.values(run_dir, "loss")[0]
    # The moments are needed for that.
    again = runs.cut(tmp_path / "whole", tmp_path / "forgetful")
    forget_moments(again / "checkpoint-000004")
    reseal(again / "checkpoint-000004")
    runs.run_alone(full, again)
    assert runs.trace(again) != runs.trace(tmp_path / "whole")


def test_an_evaluation_does_not_disturb_training(plain: Plain, tmp_path: Path) -> None:
    held = changed(plain, {"data.eval_ratio": 0.2})
    runs.run_alone(held, tmp_path / "end")
    runs.run_alone(changed(held, {"evaluation": {"every_steps": 1, "on_start": True}}), tmp_path / "often")
    assert [record["step"] for record in runs.records(tmp_path / "often", "eval")] == list(range(9))
    assert runs.trace(tmp_path / "often") == runs.trace(tmp_path / "end")


def test_a_damaged_checkpoint_is_named_and_the_run_ends_from_the_one_before_as_if_nothing_had_been(
    undisturbed: Path, plain: Plain, tmp_path: Path
) -> None:
    """Damage of every kind to every file is in tests/distributed/test_damage.py."""
    run_dir, shown = shutil.copytree(undisturbed, tmp_path / "run"), list[Any]()
    damaged = run_dir / "checkpoint-000008" / "adapter_model.safetensors"
    runs.flip(damaged)
    runs.run_alone(plain, run_dir, notify=shown.append)
    (warning,) = [record.message for record in shown if isinstance(record, Note) and record.level == "warning"]
    assert str(damaged) in warning
    # Out of the way, not deleted.
    assert len(list(run_dir.glob("damaged-checkpoint-000008-*"))) == 1
    assert runs.trace(run_dir) == runs.trace(undisturbed)


def test_checkpointing_is_the_same_run_and_offload_needs_a_gpu(undisturbed: Path, plain: Plain, tmp_path: Path) -> None:
    """The run continues with it, dropout included: it may be switched on where memory is short."""
    run_dir = runs.cut(undisturbed, tmp_path / "run")
    runs.run_alone(changed(plain, {"train.gradient_checkpointing": "selective"}), run_dir)
    assert runs.values(run_dir, "loss") == pytest.approx(runs.values(undisturbed, "loss"), rel=1e-6)
    with pytest.raises(ConfigError, match="already in CPU memory"):
        runs.assemble_alone(changed(plain, {"train.activation_offload": True}), tmp_path / "offload")


@pytest.mark.parametrize("log_every", [1, 3])
def test_a_run_that_is_asked_to_stop_saves_at_that_step_and_goes_on_to_the_same_bits(
    plain: Plain, undisturbed: Path, tmp_path: Path, log_every: int
) -> None:
    """Whatever the schedule: checkpoints are due at 4 and 8, and every third step is logged."""
    logged = changed(plain, {"tracking.log_every": log_every})
    assembled = runs.assemble_alone(logged, tmp_path)
    loop = assembled.loop
    loop.has_request = lambda: loop.state.step == 4  # in the fifth
    loop.run()
    loop.trackers.finish()
    assert loop.stopped
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-000004", "checkpoint-000005"]
    assert runs.values(tmp_path, "step")[-1] == 5
    assert not runs.run_alone(logged, tmp_path).loop.stopped
    weights = [runs.adapter_weights(folder / "checkpoint-000008") for folder in (tmp_path, undisturbed)]
    assert runs.relative_difference(*weights) == 0
    assert sum(runs.values(tmp_path, "supervised")) == sum(runs.values(undisturbed, "supervised"))
    if log_every == 1:
        assert runs.trace(tmp_path) == runs.trace(undisturbed)
