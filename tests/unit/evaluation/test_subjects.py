"""The models and the rows of an evaluation: how weights are told apart, and what is said of rows that are left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from finray.config.schema import ModelConfig
from finray.config.tasks import task_spec
from finray.evaluation.subjects import Case, EvaluationRequest, Subject, files_of
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put


def talk(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": answer}]}


SHORT, LONG, BAD = talk("a cat"), talk("the dog sleeps " * 40), {"messages": "none"}


@pytest.mark.parametrize(
    ("rows", "lost"), [([SHORT, LONG, SHORT, BAD, LONG, LONG], 3), ([SHORT, BAD, SHORT], 0), ([SHORT, LONG], 1)]
)
def test_rows_of_a_file_that_are_too_long_are_counted_wherever_they_are_and_no_others(
    preparing: Preparing, put: Write, tmp_path: Path, rows: list[Any], lost: int
) -> None:
    file = put("rows.jsonl", lines(rows))
    config = preparing.config(file, on_bad_row="drop", on_too_long="drop", prepare={"dir": str(tmp_path / "prepared")})
    request = EvaluationRequest(file=str(file))
    case = Case(request, None, config, task_spec("causal_lm"), (), tmp_path, lambda *_, **__: None)
    assert case.rows is not None
    assert len(case.rows) == rows.count(SHORT)
    assert case.notes == ([f"{lost} rows are longer than data.max_length=64 and were skipped"] if lost else [])


def test_weights_are_told_apart_by_the_names_sizes_and_times_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in (("b.safetensors", "12"), ("a.json", "1"), ("c.jinja", "123"), ("d.txt", "other")):
        (folder / name).write_text(content)
        os.utime(folder / name, ns=(5, 7))
    listed = {"name": str(folder), "files": [["b.safetensors", 2, 7], ["a.json", 1, 7], ["c.jinja", 3, 7]]}
    listed["files"].sort()  # type: ignore[attr-defined]
    assert files_of(str(folder)) == listed
    assert files_of(str(folder / "a.json")) == {"name": str(folder / "a.json"), "files": [["a.json", 1, 7]]}
    cached = tmp_path / "models--o--m" / "snapshots" / "0123" / "config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(cached))
    assert files_of("o/m") == {"name": "o/m", "commit": "0123"}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    assert files_of("o/m") == {"name": "o/m", "commit": None}

    own: Any = type("Own", (), {"folder": folder, "base": ModelConfig(name="o/m", revision="r")})()
    base = {"name": "o/m", "commit": None, "revision": "r"}
    assert Subject("tuned", own).identity == {"weights": listed, "base": base}
    assert Subject("base", own, adapter=False).identity == {"weights": None, "base": base}
    own.base = None
    assert Subject("whole", own, adapter=False).identity == {"weights": listed, "base": None}
