"""What a finished run recommends works on it."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finray.checkpoint.rundir import RunDir
from finray.config.load import build_config
from finray.records import RunSummary
from finray.runtime.driver import TrainResult

PHASES = dict.fromkeys(
    ("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint", "data_wait", "total"), 1.0
)
SUMMARY = RunSummary(2, 2, 9, 9, 1.0, 9.0, 1.0, 0.5, "eval_loss", None, PHASES, (1,))


def recommended(run: Path, sections: dict[str, Any], best: float | None = None) -> list[list[str]]:
    """The words of the commands that are recommended after a run with these sections in its config."""
    config = build_config({"model": {"name": "m"}, "data": {"source": "d.jsonl"}, **sections}, source="test")
    run.mkdir(parents=True, exist_ok=True)
    RunDir(run).keep_config(config)
    console = Console(file=io.StringIO(), width=160)
    TrainResult(run, run / "final", 2, replace(SUMMARY, best=best)).print(console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [shlex.split(line.removeprefix("next: "), comments=True) for line in lines if line.startswith("next: ")]


@pytest.mark.parametrize(
    ("sections", "best", "expected"),
    [
        ({}, None, ["generate", "export"]),
        ({"data": {"source": "d.jsonl", "eval_ratio": 0.1}}, 0.5, ["generate", "evaluate", "export"]),
        ({"data": {"source": "d.jsonl", "test_ratio": 0.1}}, None, ["generate", "evaluate", "export"]),
        ({"model": {"name": "m", "task": "tests.support.talk:Task"}}, 0.5, ["export"]),
        ({"model": {"name": "m", "task": "sequence_classification"}}, 0.5, ["generate", "evaluate", "serve", "export"]),
    ],
)
def test_a_finished_run_recommends_what_works(
    tmp_path: Path, sections: dict[str, Any], best: float | None, expected: list[str]
) -> None:
    commands = recommended(tmp_path, sections, best)
    assert [command[1] for command in commands] == expected
    if "serve" in expected:
        assert ["finray", "generate", str(tmp_path), "a text"] in commands


def test_a_recommended_command_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "my runs" / "first"
    assert recommended(run, {})[-1][2] == str(run)
    # The user may be where the run was started, and then a short name is enough.
    monkeypatch.chdir(tmp_path)
    assert recommended(run, {})[-1][2] == "my runs/first"
    # The directory of a run behind a URL is a copy on the machine of the driver: other machines do not have it.
    behind = {"run": {"output_dir": "s3://bucket/my runs/", "name": "first"}}
    assert recommended(tmp_path / "copy", behind)[-1][1:3] == ["export", "s3://bucket/my runs/first"]
