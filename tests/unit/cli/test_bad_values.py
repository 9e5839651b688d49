"""Every argument and option of every command, given what is none: one message, and never a defect of finray's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from finray import limits
from finray.cli.main import app
from finray.config.load import load_config
from finray.config.schema import section_of, sections
from finray.errors import FinrayError
from finray.planning.checks import quick_problems
from tests.support import runs

# What is in the way of no other argument: a run without weights, files that are none, addresses where nobody listens.
GOOD = {"config": "run.yaml", "file": "lf.yaml", "output": "out", "address": "127.0.0.1:9", "path": "new.yaml"}
BAD = ("", "\0", "x" * 5000, "~nobody/x", "folder", "pipe", "bytes.yaml", "\udcff", "9" * 400, "inf")
# Of options, of which there are many: each option gets one of these, and each command all.
BAD_OPTIONS = ("\0", "x" * 5000, "~nobody/x", "inf")
# They start or stop something on this machine, or look at all of it.
LEFT_OUT = {("cluster", "up"), ("cluster", "down"), ("doctor",), ("train",), ("jobs", "logs"), ("jobs", "stop")}


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = {path: one for path, one in commands(typer.main.get_command(app)) if path not in LEFT_OUT}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "run.yaml": "model: {name: ./none}\ndata: {source: rows.jsonl}\n",
        "lf.yaml": "model_name_or_path: m\ndataset: d\n",
        "rows.jsonl": '{"prompt": "a", "completion": "b"}\n',
        "runs/x/config.yaml": "model: {name: ./none}\ndata: {source: rows.jsonl}\n",
        "runs/x/final/config.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes.yaml").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits, "PIPE_S", 0.01)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def given(command: Any, bad: Any, value: str) -> list[str]:
    """The words of a command with one bad value: its other options first, then its arguments."""
    options, arguments = [], []
    for one in command.params:
        good = GOOD.get(one.name, "runs/x")
        if one is bad and one.param_type_name == "option":
            options.append(f"{one.opts[0]}={value}")
        elif one is bad or (one.param_type_name == "argument" and (one.required or one.name == "config")):
            arguments.append(value if one is bad else good)
        elif one.required:
            options.append(f"{one.opts[0]}={good}")
    return [*options, "--", *arguments]


@pytest.mark.long
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_bad_value_is_one_message(path: tuple[str, ...]) -> None:
    for at, one in enumerate(COMMANDS[path].params):
        if getattr(one, "is_flag", False):
            continue
        for value in BAD if one.param_type_name == "argument" else (BAD_OPTIONS[at % len(BAD_OPTIONS)],):
            code, _, err = runs.finray(*path, *given(COMMANDS[path], one, value))
            what = f"{' '.join(path)} {one.name}={value[:20]!r}: {err}"
            assert code in (0, 2), what
            assert "this is a bug in finray" not in err, what
            assert "Traceback" not in err, what
            assert code == 0 or err.strip(), what


def test_the_test_sees_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.cli.convert.read_foreign", lambda *_, **__: {}["none"])
    with pytest.raises(AssertionError, match="this is a bug in finray"):
        test_a_bad_value_is_one_message(("convert",))


VALUES = (
    *("", "null", "true", "-1", "0.5", "1e400", ".nan", "9" * 400, "x" * 5000, '"\\0"', "~nobody/x", "folder", "pipe"),
    *("s3://", "[[1]]", "{1: 2}", "2024-01-01", "!!binary aGk=", "os:path", "x:y", "a:", "$HOME/x", "{% x", "a\nb"),
)


def fields(kind: Any, path: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield f"{path}.{name}"
        if (inside := section_of(field.annotation)) is not None:
            yield from fields(inside, f"{path}.{name}{'.0' if 'list' in str(field.annotation) else ''}")


@pytest.mark.long
@pytest.mark.parametrize("section", sections())
def test_a_field_of_another_kind_is_one_message(section: str) -> None:
    """Also of what the checks before a run make of it."""
    for path in (section, *fields(sections()[section], section)):
        for value in VALUES:
            try:
                for problem in quick_problems(load_config("run.yaml", [f"{path}={value}"])):
                    assert isinstance(problem, FinrayError)
            except FinrayError as error:
                assert len(str(error)) < 30_000, path  # noqa: PT017


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "words", "ending", "code"),
    [
        ({"COLUMNS": "99999999999"}, "plan -h", "", 0),
        ({"COLUMNS": "-5", "HOME": "", "LANG": "C", "TERM": ""}, "config show run.yaml", "", 0),
        ({"PYTHONIOENCODING": "ascii", "XDG_CACHE_HOME": "/dev/null/x"}, "convert lf.yaml", "", 0),
        ({}, "config show run.yaml", ">&-", 0),
        ({}, "config show run.yaml", "<&-", 0),
        ({}, "config show run.yaml", "| head -1", 0),
        ({}, "config show run.yaml", ">/dev/full", 2),
        ({"PYTHONUNBUFFERED": "1"}, "config show run.yaml", ">/dev/full", 2),
        ({}, "version", ">/dev/full", 2),
        ({}, "plan -h", "| true", 2),
        ({}, "config show none.yaml", "2>&-", 2),
        ({}, "config show none.yaml", "2>/dev/full", 2),
    ],
)
def test_a_bad_environment_is_no_defect(
    environment: dict[str, str], words: str, ending: str, code: int, place: Path
) -> None:
    command = f"set -o pipefail; {sys.executable} -m finray {words} {ending}"
    # Buffered, as in most shells.
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **environment}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done
    assert not any(words in done.stderr for words in ("this is a bug", "Traceback", "Exception ignored")), done
    assert done.stderr.count("error: ") == (code == 2 and not ending.startswith("2>")), done
    assert not list(place.glob("cache/**/finray-*.txt"))


def test_a_directory_that_is_gone_is_said(place: Path) -> None:
    command = f"cd folder && rmdir ../folder && {sys.executable} -m finray plan {place}/run.yaml"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the working directory does not exist any more" in done.stderr
