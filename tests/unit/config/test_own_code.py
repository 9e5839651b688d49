"""Code of the user's own: which fields name it, and which files of a directory a job takes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from finray.config import own_code
from finray.config.load import load_config
from finray.config.own_code import python_files
from finray.errors import ConfigError

pytestmark = pytest.mark.long

CONFIG = load_config("smollm2-lora")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_every_field_that_takes_code_is_known() -> None:
    fields = {
        "model.task": "mine:a",
        "adapter.method": "mine:b",
        "parallel.strategy": "mine:c",
        "data.converter": "mine:d",
        "tracking.trackers": ["tensorboard", "mine:e"],
        "evaluation.metrics": ["pass_at_k", "mine:f"],
        "evaluation.scoring": {"checker": "mine:g", "run_code": True},
        "data.eval_ratio": 0.1,
        "evaluation.generate_rows": 2,
    }
    named = own_code.own_code(load_config("smollm2-lora", fields))
    assert [name for _, name in named] == [f"mine:{letter}" for letter in "abcdefg"]
    assert {field for field, _ in named} <= fields.keys() | {"evaluation.scoring.checker"}
    assert own_code.own_code(CONFIG) == []


def test_the_python_files_are_taken_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "pack/__init__.py", "pack/deep/part.py", "rows.jsonl", ".env", ".git/hook.py")
    write(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", "conda/conda-meta/history", "conda/y.py", ".hidden.py")
    assert python_files(tmp_path, CONFIG) == ({"mine.py": "", "pack/__init__.py": "", "pack/deep/part.py": ""}, ())


def test_what_would_replace_an_installed_package_is_left_out_unless_the_config_names_it(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "torch.py", "datasets/rows.py", "pack/json.py", "yaml/only.txt")
    files, left_out = python_files(tmp_path, CONFIG)
    assert sorted(files) == ["mine.py", "pack/json.py"]
    assert left_out == ("datasets", "torch.py")
    named = load_config("smollm2-lora", {"data.converter": "datasets.rows:convert"})
    assert sorted(python_files(tmp_path, named)[0]) == ["datasets/rows.py", "mine.py", "pack/json.py"]


@pytest.mark.parametrize("most", ["_MOST_FILES", "_MOST_BYTES"])
def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    python_files(tmp_path, CONFIG)
    monkeypatch.setattr(own_code, most, 1)
    with pytest.raises(ConfigError, match="there are more than"):
        python_files(tmp_path, CONFIG)


def test_a_file_with_a_token_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("login('hf_abcdefghijklmnopqrstuv')\n")
    with pytest.raises(ConfigError, match="holds a token") as caught:
        python_files(tmp_path, CONFIG)
    assert str(tmp_path / "mine.py") in str(caught.value)
    assert "hf_abc" not in str(caught.value)
    # As is one with the value of a secret variable.
    (tmp_path / "mine.py").write_text("KEY = 's3cr3t-value-1'\ntoken = tokenizer_of_2_models\n")
    assert python_files(tmp_path, CONFIG)[0].keys() == {"mine.py"}
    monkeypatch.setenv("MY_JOB_TOKEN", "s3cr3t-value-1")
    with pytest.raises(ConfigError, match="holds a token"):
        python_files(tmp_path, CONFIG)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match="no Python files"):
        python_files(tmp_path, CONFIG)
