"""A run that is made longer continues as the longer run that it would have been from the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from finray.checkpoint import CheckpointStore
from finray.records import Note
from finray.training.checkpointing import MOMENTS
from tests.support import runs
from tests.support.checkpoints import reseal
from tests.support.runs import Plain, changed

# 30 rows in steps of 4: an epoch ends in the middle of a step, and the last step of one epoch has 2 rows.
ROWS = {"data.packing": False, "train.max_steps": None, "train.schedule": "constant"}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    return tiny_run({"adapter.dropout": 0.2, **ROWS}, model=dropout_model)


def extended(plain: Plain, run_dir: Path, **train: Any) -> list[str]:
    """Go on with other fields of the train section; what was said."""
    said: list[Any] = []
    assembled = runs.assemble_alone(changed(plain, {"train": train}), run_dir, notify=said.append)
    # What is done again is not there meanwhile.
    assert CheckpointStore(run_dir).steps()[-1] == assembled.loop.state.step
    assembled.loop.run()
    assembled.loop.trackers.finish()
    return [record.message for record in said if isinstance(record, Note)]


@pytest.fixture(scope="module")
def planned(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs from the start."""
    run_dir = tmp_path_factory.mktemp("planned") / "run"
    runs.run_alone(changed(plain, {"train.epochs": 2}), run_dir)
    return run_dir


@pytest.fixture
def short(plain: Plain, tmp_path: Path) -> Path:
    """One epoch."""
    runs.run_alone(changed(plain, {"train.epochs": 1}), tmp_path / "short")
    return tmp_path / "short"


def test_more_epochs_are_those_of_a_run_that_had_them_from_the_start(plain: Plain, planned: Path, short: Path) -> None:
    assert runs.values(short, "step") == list(range(1, 9))
    assert len(runs.values(short, "samples")[-1]) == 2
    said = extended(plain, short, epochs=2)
    assert len(runs.values(short, "step")) == 15
    assert runs.trace(short) == runs.trace(planned)
    assert any("from 8 to 15 steps; the constant schedule is unchanged" in line for line in said), said
    assert any("was not a full one: repeating steps 5 to 8" in line for line in said), said


def test_more_epochs_without_the_moments_are_another_run(plain: Plain, planned: Path, short: Path) -> None:
    """Negative control: the comparison sees an optimizer that begins anew."""
    checkpoint = short / "checkpoint-000004"
    save_file({}, checkpoint / "training_state" / f"{MOMENTS}-00001-of-00001.safetensors")
    reseal(checkpoint)
    extended(plain, short, epochs=2)
    assert runs.values(short, "samples") == runs.values(planned, "samples")
    assert runs.trace(short) != runs.trace(planned)


def test_more_steps_of_a_stopped_run_begin_another_curve_which_is_said(plain: Plain, tmp_path: Path) -> None:
    plain = changed(plain, {"train": {"schedule": "cosine", "max_steps": 8, "min_learning_rate": 0.001}})
    runs.run_alone(changed(plain, {"train.max_steps": 12}), tmp_path / "planned")
    runs.run_alone(plain, tmp_path / "run")
    said = extended(plain, tmp_path / "run", max_steps=12)
    rates = runs.values(tmp_path / "run", "lr")
    assert rates[8:] == runs.values(tmp_path / "planned", "lr")[8:]
    assert rates[8] > 2 * rates[7]
    assert any(f"changes from {rates[7]:.2e} to {rates[8]:.2e}, and now ends at step 12" in line for line in said), said
    assert runs.values(tmp_path / "run", "samples") == runs.values(tmp_path / "planned", "samples")
    # Where nothing is extended, nothing is said.
    assert not any(
        "extended" in line
        for line in extended(plain, runs.cut(tmp_path / "run", tmp_path / "cut", step=12), max_steps=12)
    )


def test_a_trial_of_some_steps_goes_on_to_whole_epochs(plain: Plain, planned: Path, tmp_path: Path) -> None:
    runs.run_alone(changed(plain, {"train": {"epochs": 2, "max_steps": 3}}), tmp_path / "run")
    assert len(runs.values(tmp_path / "run", "step")) == 3
    assert any("from 3 to 15 steps" in line for line in extended(plain, tmp_path / "run", epochs=2))
    assert runs.trace(tmp_path / "run") == runs.trace(planned)


def test_without_an_earlier_checkpoint_it_goes_on_from_the_short_step_and_every_row_is_seen(
    plain: Plain, planned: Path, tmp_path: Path
) -> None:
    plain = changed(plain, {"checkpoint.every_steps": 100})
    runs.run_alone(changed(plain, {"train.epochs": 1}), tmp_path / "run")
    said = extended(plain, tmp_path / "run", epochs=2)
    assert any("later steps see other rows" in line for line in said), said
    flat = [sample for step in runs.values(tmp_path / "run", "samples") for sample in step]
    assert flat == [sample for step in runs.values(planned, "samples") for sample in step]
    assert len(runs.values(tmp_path / "run", "step")) == 16
    # The same from a checkpoint of the longer run.
    again = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    assert not any("extended" in line for line in extended(plain, again, epochs=2))
