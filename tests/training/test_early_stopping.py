"""Runs that end where the evaluation loss stops falling, and the checkpoint of the lowest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from finray.tracking.jsonl import read_records
from finray.training import loop
from tests.support import runs, tiny


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    tiny.save_model("llama", folder / "model", tiny.train_tokenizer())
    rows = tiny.write_chat_rows(folder, 30)
    held_out: dict[str, dict[str, Any]] = {"data": {"eval_ratio": 0.2}, "evaluation": {"every_steps": 2}}
    return runs.settings(folder / "model", rows, folder, **held_out)


def stopping(plain: dict[str, Any], **early: Any) -> dict[str, Any]:
    return {**plain, "evaluation": {"every_steps": 2, "early_stopping": early}}


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == kind]


# No evaluation after the first is a gain of so much: with patience for two the third is the last, at step 6 of 8.
HARD = {"patience": 2, "min_gain": 100.0}


def test_a_run_ends_after_evaluations_without_a_gain(plain: dict[str, Any], tmp_path: Path) -> None:
    runs.run_alone(plain, tmp_path / "whole")
    assembled = runs.run_alone(stopping(plain, **HARD), tmp_path / "short")
    assert assembled.loop.state.step == 6
    assert runs.trace(tmp_path / "short") == runs.trace(tmp_path / "whole")[:6]
    (note,) = records(tmp_path / "short", "note")
    assert "step 6 of 8" in note["message"]
    assert CheckpointStore(tmp_path / "short").steps()[-1] == 6
    # Loss that falls is left alone.
    assert runs.run_alone(stopping(plain, patience=2), tmp_path / "patient").loop.state.step == 8


def test_it_stays_stopped_and_goes_on_with_more_patience(plain: dict[str, Any], tmp_path: Path) -> None:
    runs.run_alone(plain, tmp_path / "whole")
    runs.run_alone(stopping(plain, **HARD), tmp_path / "run")
    assert runs.run_alone(stopping(plain, **HARD), tmp_path / "run").loop.state.step == 6
    assert runs.run_alone(stopping(plain, patience=9, min_gain=100.0), tmp_path / "run").loop.state.step == 8
    assert runs.trace(tmp_path / "run") == runs.trace(tmp_path / "whole")


def test_a_killed_run_has_not_forgotten_how_long_it_waited(plain: dict[str, Any], tmp_path: Path) -> None:
    runs.run_alone(stopping(plain, **HARD), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-000006")
    assembled = runs.assemble_alone(stopping(plain, **HARD), tmp_path / "run")
    assert (assembled.loop.state.step, assembled.loop.state.stale_evaluations) == (4, 1)
    assembled.loop.run()
    assert assembled.loop.state.step == 6


@pytest.mark.parametrize(("keep_best", "kept"), [(True, [2, 6]), (False, [6])])
def test_the_lowest_evaluation_loss_is_saved_wherever_it_is(
    plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_best: bool, kept: list[int]
) -> None:
    losses = iter([1.0, 1.5, 1.2])
    monkeypatch.setattr(loop, "evaluate", lambda *arguments: {"eval_loss": next(losses)})
    rare = {**plain, "checkpoint": {"every_steps": 100, "keep_last": 1, "keep_best": keep_best}}
    rare["train"] = {**plain["train"], "max_steps": 6}
    runs.run_alone(rare, tmp_path / "run")
    assert CheckpointStore(tmp_path / "run").steps() == kept
    assert CheckpointStore(tmp_path / "run").best("eval_loss", "min") == kept[0]
