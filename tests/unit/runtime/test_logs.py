"""What workers print is kept in the run directory, without secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import DataError
from finray.records import EvalRecord, Note, PrepareProgress, Record, TrainRecord
from finray.runtime.driver import _logged
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


def test_what_the_command_shows_is_kept_with_times_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    run: Any = SimpleNamespace(path=tmp_path)
    shown: list[Record] = []
    said: list[Record] = [
        *(PrepareProgress(part, 2, 10, 100, 1.0) for part in (1, 2)),
        TrainRecord(3, 0.1, 1.25, 0.5, 1e-3, 10, 10, "", 100.0, 0.0, 1.0, 0),
        EvalRecord(3, {"eval_loss": 1.5}, 10, 1.0),
        Note("a token hf_abcdefghijklmnop", level="warning"),
    ]

    def train(*, then: BaseException | None = None) -> None:
        with _logged(run, shown.append) as handle:
            for record in said:
                handle(record)
            if then is not None:
                raise then

    with pytest.raises(DataError):
        train(then=DataError("row 3 is odd", where="rows.jsonl:3", repair="mend it"))
    assert shown == said
    lines = (tmp_path / "logs" / "training.log").read_text().splitlines()
    assert [line[20:] for line in lines[1:]] == [
        "prepared 10 rows in 1 s",
        "step 3/0  loss 1.2500  lr 1.00e-03  grad norm 0.500  100 tokens/s",
        "step 3/0  eval loss 1.5000",
        "warning: a token ***",
        "rows.jsonl:3: row 3 is odd",
        "  repair: mend it",
    ]
    with pytest.raises(KeyboardInterrupt):
        train(then=KeyboardInterrupt())
    assert tail(tmp_path / "logs" / "training.log", 1)[0].endswith(" stopped")
    # A bug of finray's or of a library's is kept as a traceback.
    with pytest.raises(ZeroDivisionError):
        train(then=ZeroDivisionError("by nothing"))
    end = tail(tmp_path / "logs" / "training.log", 8)
    assert any("Traceback" in line for line in end)
    assert end[-1].endswith("ZeroDivisionError: by nothing")
    (tmp_path / "file").touch()
    run.path = tmp_path / "file"
    train()
    assert shown == said * 4


def test_a_worker_starts_without_what_only_a_terminal_needs() -> None:
    script = "import sys, finray.runtime.worker; print(*{'rich', 'typer', 'scipy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
