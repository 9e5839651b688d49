"""What workers print is kept in the run directory, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from finray.runtime.logs import LogCopy, tail


def test_what_is_printed_after_the_start_is_copied_to_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    err.write_text("")
    target = tmp_path / "logs" / "rank-00000.log"
    log = LogCopy(target, [out, err], title="the first", pause_s=1000)
    with out.open("a") as stream:
        stream.write("one\ntoken hf_abcdefghijklmnop\nno end")
    err.write_text("two\n")
    log.close()
    lines = target.read_text().splitlines()
    assert lines[:2] == ["== the first", "one"]
    assert "hf_abcdefghijklmnop" not in target.read_text()
    assert lines[3].startswith("no end")
    assert "two" in target.read_text()
    again = LogCopy(target, [out], title="the second", pause_s=1000)
    again.close()
    assert tail(target, 1) == ["== the second"]
    assert tail(tmp_path / "none") == []


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    LogCopy(tmp_path / "logs" / "rank-00000.log", [], title="x", pause_s=1000).close()
