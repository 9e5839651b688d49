"""Files of a data directory that are not read or hold no rows, and rows that are trained on and held out: plan,
prepare, train and inspect say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import open_run
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.inspection.inspect import inspect
from finray.inspection.result import findings
from finray.models.packing_cache import packing_of
from finray.planning.sample_data import examine
from finray.records import Note, Record
from finray.runtime.driver import decide_from_data
from finray.runtime.prepare import prepare_and_report
from tests.support import runs, tiny

SAID = "files that are not read: 1 of other types (more.xlsx)"


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> Config:
    (tmp_path / "data").mkdir()
    tiny.write_chat_rows(tmp_path / "data", 12)
    (tmp_path / "data" / "more.xlsx").write_bytes(b"PK")
    return runs.config_of(runs.tiny_run(tiny_model_dir, tmp_path / "data", tmp_path / "out"))


def of_plan(config: Config) -> list[str]:
    found = examine(config)
    return [*found.notes, *found.warnings]


def of_prepare(config: Config) -> list[str]:
    return list(prepare_and_report(config).notes)


def of_inspect(config: Config) -> list[str]:
    return [check.finding for check in findings(inspect(config)) if check.level in ("note", "warning")]


def of_train(config: Config) -> list[str]:
    records: list[Record] = []
    with open_run(config, fresh=False, notify=lambda text: None) as run:
        known = runs.resolved_of(config), prepare_here(config), config, run, records.append, packing_of(config.model)
        decide_from_data(*known)
    return [one.message for one in records if isinstance(one, Note)]


COMMANDS = [of_plan, of_prepare, of_inspect, of_train]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_files_are_not_read(config: Config, command: Any) -> None:
    assert sum(SAID in line for line in command(config)) == 1
    (Path(str(config.data.source)) / "more.xlsx").unlink()
    assert not any("not read" in line for line in command(config))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_files_are_by_name_of_another_split(config: Config, tmp_path: Path, command: Any) -> None:
    """All files are read where none is named after a split."""
    (tmp_path / "data" / "more.xlsx").unlink()
    file = Path(str(config.data.source)) / "rows.jsonl"
    file.rename(file.with_name("my_rows.jsonl"))
    tiny.write_chat_rows(tmp_path / "data", 5, start=20).rename(file.with_name("my_test.jsonl"))
    assert sum("trained on, but by name to be held out: my_test.jsonl" in line for line in command(config)) == 1
    file.with_name("my_test.jsonl").rename(file.with_name("my_contest.jsonl"))
    assert not any("by name" in line for line in command(config))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_held_out_rows_are_trained_on(config: Config, tmp_path: Path, command: Any) -> None:
    (tmp_path / "eval").mkdir()
    other = tiny.write_chat_rows(tmp_path / "eval", 5, start=10)
    changed = config.model_copy(update={"data": config.data.model_copy(update={"eval_source": str(other)})})
    (line,) = [line for line in command(changed) if "say little" in line or "says little" in line]
    assert "2 of 5 rows" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_files_hold_no_rows(config: Config, tmp_path: Path, command: Any) -> None:
    (tmp_path / "data" / "a.jsonl").write_text("")
    (tmp_path / "data" / "b.csv").write_text("messages\n")
    (line,) = [line for line in command(config) if "without rows" in line]
    assert "2 files without rows: a.jsonl, b.csv" in line
