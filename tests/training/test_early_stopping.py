"""Runs that end where the evaluation loss stops falling, and the checkpoint of the lowest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from tests.support import runs
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run({"data.eval_ratio": 0.2, "evaluation.every_steps": 2})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    """The run that nothing stops."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    runs.run_alone(plain, run_dir)
    return run_dir


def stopping(plain: Plain, **early: Any) -> Plain:
    return changed(plain, {"evaluation.early_stopping": early})


# No evaluation after the first is a gain of so much: with patience for two the third is the last, at step 6 of 8.
HARD = {"patience": 2, "min_gain": 100.0}


def test_a_run_ends_after_evaluations_without_a_gain(plain: Plain, whole: Path, tmp_path: Path) -> None:
    assembled = runs.run_alone(stopping(plain, **HARD), tmp_path / "short")
    assert assembled.loop.state.step == 6
    assert runs.trace(tmp_path / "short") == runs.trace(whole)[:6]
    (note,) = runs.records(tmp_path / "short", "note")
    assert "step 6 of 8" in note["message"]
    # It has fallen, and by less than was asked for.
    assert "has not improved by more than 100 in 2 evaluations" in note["message"]
    assert CheckpointStore(tmp_path / "short").steps()[-1] == 6
    # It stays stopped, and goes on with more patience.
    assert runs.run_alone(stopping(plain, **HARD), tmp_path / "short").loop.state.step == 6
    assert runs.run_alone(stopping(plain, patience=9, min_gain=100.0), tmp_path / "short").loop.state.step == 8
    assert runs.trace(tmp_path / "short") == runs.trace(whole)
    # Loss that falls is left alone.
    assert runs.run_alone(stopping(plain, patience=2), tmp_path / "patient").loop.state.step == 8
