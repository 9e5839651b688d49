"""The rules of the quarantine, and the table of tools/under_load.py."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from tools import quarantine, under_load

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
