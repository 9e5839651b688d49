"""The ledger of groups that have passed, the rules of the quarantine, and the table of tools/under_load.py."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path

import pytest
from tools import passed, quarantine, under_load

LEDGER = """# A comment.

[engines]
files = ["a/*.py"]
digest = "old"
date = "2026-01-01"

[slurm]
files = ["b.py"]
"""


@pytest.fixture
def group(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("1")
    return {"files": ["a/*.py"], "digest": passed.digest(["a/*.py"], root=tmp_path), "date": "today", "commit": "abc"}


def test_a_group_runs_again_where_its_files_have_changed(group: dict[str, object], tmp_path: Path) -> None:
    assert passed.why(group, root=tmp_path) == ""
    (tmp_path / "b.py").write_text("another group's")
    assert passed.why(group, root=tmp_path) == ""
    (tmp_path / "a" / "one.py").write_text("2")
    assert "changed since it passed on today (abc)" in passed.why(group, root=tmp_path)
    (tmp_path / "a" / "one.py").write_text("1")
    (tmp_path / "a" / "two.py").write_text("")
    assert passed.why(group, root=tmp_path)
    assert passed.why({"files": ["a/*.py"]}, root=tmp_path) == "it has not passed yet"
    with pytest.raises(SystemExit, match=r"no file matches c/\*"):
        passed.digest(["c/*"], root=tmp_path)


@pytest.mark.parametrize("name", ["engines", "slurm"])
def test_what_has_passed_is_noted_for_its_group_alone(name: str) -> None:
    before, after = tomllib.loads(LEDGER), tomllib.loads(passed.noted(LEDGER, name, {"digest": "new", "commit": "abc"}))
    assert after.pop(name) == {**before.pop(name), "digest": "new", "commit": "abc"}
    assert after == before


def test_every_group_of_the_ledger_has_files() -> None:
    for group in tomllib.loads(passed.LEDGER.read_text()).values():
        assert passed.digest(group["files"])


ENTRY = """
[[test]]
id = "tests/test_x.py::test_one[a]"
date = 2026-11-22
seen = "it hung"
why = "not known"
"""


def test_an_entry_is_of_a_test_and_no_older_than_a_week(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_one(): ...\n")
    (tmp_path / "entries.toml").write_text(ENTRY + ENTRY.replace("test_one[a]", "test_two"))
    known, gone = quarantine.read(tmp_path / "entries.toml")
    assert known == quarantine.Entry("tests/test_x.py::test_one[a]", date(2026, 11, 22), "it hung", "not known")
    assert quarantine.problems([known], date(2026, 11, 29), tmp_path) == []
    (late,) = quarantine.problems([known], date(2026, 11, 30), tmp_path)
    assert "since 2026-11-22" in late
    (lost,) = quarantine.problems([gone], date(2026, 11, 29), tmp_path)
    assert lost.startswith("tests/test_x.py::test_two:")
    (tmp_path / "entries.toml").write_text(ENTRY.replace('why = "not known"', ""))
    with pytest.raises(ValueError, match="id, date, seen, why"):
        quarantine.read(tmp_path / "entries.toml")


def test_failures_are_counted_with_their_seeds(tmp_path: Path) -> None:
    cases = '<testcase classname="tests.test_x" name="test_one">{}</testcase>'
    results = under_load.Results()
    for seed, inside in enumerate(["", "<failure>late</failure>", "<error>later</error>", "<skipped/>"], 1):
        (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases.format(inside)}</testsuite></testsuites>")
        results.add_report(tmp_path / "report.xml", seed)
    assert results.outcomes == {"tests/test_x.py::test_one": {"passed": 1, "failed": 2, "skipped": 1}}
    assert results.seeds == {"tests/test_x.py::test_one": [2, 3]}
    assert results.first == ("tests/test_x.py::test_one", 2, "late")
