"""Files of a data directory that are not read: plan, prepare, train and inspect say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import open_run
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.inspection.checks import findings, verdict
from finray.inspection.inspect import inspect
from finray.planning.sample_data import examine
from finray.records import Note, Record
from finray.runtime.driver import settle
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
    return examine(config).notes


def of_prepare(config: Config) -> list[str]:
    return list(prepare_and_report(config).notes)


def of_inspect(config: Config) -> list[str]:
    found = findings(inspect(config))
    assert verdict(found)[0] != "warning"
    return [check.finding for check in found if check.level == "note"]


def of_train(config: Config) -> list[str]:
    records: list[Record] = []
    with open_run(config, fresh=False, notify=lambda text: None) as run:
        settle(runs.resolved_of(config), prepare_here(config), config, run, records.append)
    return [one.message for one in records if isinstance(one, Note)]


@pytest.mark.parametrize("command", [of_plan, of_prepare, of_inspect, of_train])
def test_a_command_says_which_files_are_not_read(config: Config, command: Any) -> None:
    assert sum(SAID in line for line in command(config)) == 1
    (Path(str(config.data.source)) / "more.xlsx").unlink()
    assert not any("not read" in line for line in command(config))
