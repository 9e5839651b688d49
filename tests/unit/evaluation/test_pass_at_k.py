"""pass@k: a user's checker and the code that it runs, with their limits."""

from __future__ import annotations

import fcntl
import os
import time
from datetime import date
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from finray.config.evaluation import ScoringConfig
from finray.errors import ConfigError
from finray.evaluation.scores.base import Answered, Score, score_named
from finray.evaluation.scores.code import pass_at_k, passes

pytestmark = pytest.mark.long


def score(**settings: Any) -> Score:
    return score_named("pass_at_k", ScoringConfig(**settings))


@pytest.mark.parametrize(("tries", "k"), [(1, 1), (5, 1), (5, 3), (8, 8), (10, 2)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(tries: int, k: int) -> None:
    for right in range(tries + 1):
        draws = list(combinations(range(tries), k))
        share = Fraction(sum(any(one < right for one in draw) for draw in draws), len(draws))
        assert pass_at_k(right, tries, k) == pytest.approx(float(share))


CHECKER = """
import os, resource, sys, time
def check(answer, row):
    if answer == "secret":
        return "HF_TOKEN" not in os.environ and not os.listdir(".")
    if answer == "environment":
        home, scratch = (os.path.realpath(os.environ[name]) for name in ("HOME", "TMPDIR"))
        return home == scratch == os.path.realpath(".") and os.environ["PATH"] == row["path"]
    if answer == "limits":
        names = "RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_CORE"
        return [list(resource.getrlimit(getattr(resource, name))) for name in names] == row["limits"]
    space = {}
    exec(answer, space)
    return space["f"](row["given"]) == row["wanted"]
"""


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_check.py").write_text(CHECKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return "my_check:check"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("def f(x): return x + 1", True),
        ("def f(x): return x + 2", False),
        ("def f(x): return", False),
        ("this is no code", False),
        ("import os\nos._exit(0)", False),
        ("raise SystemExit(0)", False),
        ("print('True')\ndef f(x): return 0", False),
        ("secret", True),
    ],
)
def test_a_checker_says_what_is_right(checker: str, answer: str, right: bool) -> None:
    assert passes(checker, answer, {"given": 3, "wanted": 4}, seconds=20, memory_mb=1024) is right


def test_a_checker_has_its_limits_and_a_home_of_its_own(checker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/some/bin:/more/bin")
    assert passes(checker, "environment", {"path": "/some/bin:/more/bin"}, seconds=20, memory_mb=1024)
    # Bytes of memory, seconds of computing, bytes of a file, and no core.
    row = {"limits": [[2**30] * 2, [21] * 2, [2**26] * 2, [0] * 2]}
    assert passes(checker, "limits", row, seconds=19.5, memory_mb=1024)


def test_a_checker_is_found_where_this_process_finds_it_and_dates_of_a_row_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_check.py").write_text("def right(answer, row): return answer == row['day']")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert passes("their_check:right", "2026-11-28", {"day": date(2026, 11, 28)}, seconds=20, memory_mb=1024)


def next_files() -> list[int]:
    """The numbers that the next open files get."""
    found = [os.dup(0) for _ in range(3)]
    for one in found:
        os.close(one)
    return found


def test_nothing_of_a_checker_is_left(checker: str, tmp_path: Path) -> None:
    unused = next_files()
    # The child that the answer starts holds the lock until it is gone.
    answer = f"""import fcntl, os, time
file = open({str(tmp_path / "lock")!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
if not os.fork():
    time.sleep(100)
def f(x): return x + 1"""
    assert passes(checker, answer, {"given": 3, "wanted": 4}, seconds=20, memory_mb=1024)
    began = time.monotonic()
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert time.monotonic() - began < 30
    assert next_files() == unused, "an open file is left"


def test_what_a_checker_prints_is_not_seen(checker: str, capfd: pytest.CaptureFixture[str]) -> None:
    # What is left in a buffer is lost with the process.
    noisy = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\ndef f(x): return x + 1"
    assert passes(checker, noisy, {"given": 3, "wanted": 4}, seconds=20, memory_mb=1024)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "answer",
    ["while True: pass", "import time\ntime.sleep(100)", "f = 'x' * 2 ** 33", "open('big', 'w').write('x' * 2 ** 28)"],
)
def test_code_that_takes_too_much_is_wrong_and_ends(checker: str, answer: str) -> None:
    began = time.monotonic()
    assert passes(checker, answer, {"given": 3, "wanted": 4}, seconds=3, memory_mb=512) is False
    assert time.monotonic() - began < 60


def test_pass_at_k_is_over_all_attempts_of_a_row(checker: str) -> None:
    good, bad = "def f(x): return x + 1", "def f(x): return x"
    found = score(checker=checker, run_code=True, k=2, attempts=3)
    some = [
        Answered((good, bad, bad), "", {"given": 1, "wanted": 2}),
        Answered((bad, bad, bad), "", {"given": 1, "wanted": 2}),
    ]
    statistics = found.statistics(some)
    assert statistics is not None
    assert statistics.tolist() == [[pytest.approx(2 / 3)], [0.0]]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "checker"),
        ({"checker": "my_check:check"}, "run_code"),
        ({"checker": "my_check:check", "run_code": True, "k": 2}, "attempts"),
        ({"checker": "no_such:check", "run_code": True}, "checker"),
    ],
)
def test_code_is_run_only_where_everything_was_asked_for(checker: str, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        score(**settings)
    assert caught.value.where == f"evaluation.scoring.{field}"
