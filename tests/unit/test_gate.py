"""What decides which tests run, and that they run without anything of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools import passed

from tests.support import stranger

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


def test_nothing_of_the_users_reaches_the_tests() -> None:
    users = {
        "RAY_ADDRESS": "10.0.0.1:6379",
        "AWS_PROFILE": "work",
        "HF_TOKEN": "t",
        "HF_HUB_OFFLINE": "0",
        "RUN_NAME": "r",
    }
    users |= {"XDG_CACHE_HOME": "/cache", "https_proxy": "http://proxy", "WORLD_SIZE": "8"}
    users |= {"HOME": "/home/ada"}
    kept = {"PATH": os.environ["PATH"], "FINRAY_TEST_SEED": "3", "LANG": "C"}
    program = "import os, tests.conftest; print('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"
    out = subprocess.run([sys.executable, "-c", program], env=users | kept, capture_output=True, text=True, check=True)
    seen = dict(line.split("=", 1) for line in out.stdout.splitlines())
    assert seen.items() >= kept.items()
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert not set(seen.values()) & (set(users.values()) - {"0"})


def test_a_session_makes_a_home_once_for_all_its_processes(tmp_path: Path) -> None:
    environ = {"PATH": "/bin"}
    home = stranger.settle(environ)
    assert home is not None
    assert environ["HOME"] == str(home)
    child = {**environ, "RAY_ADDRESS": "a:1"}
    assert stranger.settle(child) is None
    assert child == environ
    stranger.remove(home)
    assert not home.exists()
