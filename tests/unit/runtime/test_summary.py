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
    config = build_config({"model": {"name": "m"}, "data": {"source": "d.jsonl"}, **sections}, source="test")
    RunDir(tmp_path).keep_config(config)
    console = Console(file=io.StringIO(), width=160)
    TrainResult(tmp_path, tmp_path / "final", 2, replace(SUMMARY, best=best)).print(console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[2] for line in lines if line.startswith("next: ")] == expected
    if "serve" in expected:
        assert f'next: finray generate {tmp_path} "a text"' in lines
        assert f"next: finray serve {tmp_path}  # its /v1/classify labels texts" in lines


def test_a_recommended_command_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "my runs" / "first"
    config = build_config({"model": {"name": "m"}, "data": {"source": "d.jsonl"}}, source="test")
    run.mkdir(parents=True)
    RunDir(run).keep_config(config)

    def recommended() -> str:
        console = Console(file=io.StringIO(), width=160)
        TrainResult(run, run / "final", 2, SUMMARY).print(console)
        line = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
        return shlex.split(str(line).removeprefix("next: "))[2]

    assert recommended() == str(run)
    # The user may be where the run was started, and then a short name is enough.
    monkeypatch.chdir(tmp_path)
    assert recommended() == "my runs/first"


def test_commands_for_a_run_behind_a_url_name_the_url(tmp_path: Path) -> None:
    # Its directory is a copy on the machine of the driver: other machines do not have it.
    plain = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}}
    config = build_config({**plain, "run": {"output_dir": "s3://bucket/my runs/", "name": "first"}}, source="test")
    RunDir(tmp_path).keep_config(config)
    console = Console(file=io.StringIO(), width=160)
    TrainResult(tmp_path, tmp_path / "final", 2, SUMMARY).print(console)
    line = str(console.file.getvalue()).splitlines()[-1]  # type: ignore[attr-defined]
    assert shlex.split(line.removeprefix("next: ")) == [
        "finray",
        "export",
        "s3://bucket/my runs/first",
        "--output",
        "DIR",
    ]
