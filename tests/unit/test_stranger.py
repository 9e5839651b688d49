"""Tests run without anything of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stranger


@pytest.mark.long
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
