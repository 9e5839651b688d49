"""pass@k: a user's checker and the code that it runs, with their limits."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from datetime import date
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from finray.config.evaluation import ScoringConfig
from finray.errors import ConfigError
from finray.evaluation.scores import checking
from finray.evaluation.scores.base import Answered, Score, score_named
from finray.evaluation.scores.code import Checked, check_answer, pass_at_k

pytestmark = pytest.mark.long


ROW = {"given": 3, "wanted": 4}


# Generous: it includes the start of a Python, on a machine that others keep busy.
LIMITS: dict[str, Any] = {"seconds": 60, "memory_mb": 1024}


def checked(answer: str, checker: str = "my_check:check", **changes: Any) -> Checked:
    return check_answer(checker, answer, ROW, **{**LIMITS, **changes})


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
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return "my_check:check"


GOOD = "def f(x): return x + 1"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (GOOD, "right"),
        ("def f(x): return x + 2", "wrong"),
        ("def f(x): return", "wrong"),
        ("this is no code", "wrong"),
        ("raise SystemExit(0)", "wrong"),
        ("def f(x): return unknown", "wrong"),
        ("import json\njson.loads('{')", "wrong"),
        # Written and run as a file.
        ("open('own.py', 'w').write('1 / 0')\nimport runpy\nrunpy.run_path('own.py')", "wrong"),
        ("print('True')\ndef f(x): return 0", "wrong"),
        ("import os\nos._exit(0)", "ended"),
        ("import os\nos.killpg(0, 9)", "ended"),
        ("import ctypes\nctypes.string_at(0)", "ended"),
        # It stays until somebody looks at how many there are.
        ("import os, time\nfor _ in range(200):\n    if not os.fork(): break\ntime.sleep(100)", "ended"),
        ("secret", "right"),
    ],
)
def test_a_checker_says_what_is_right_and_an_answer_is_to_blame_for_what_it_raises(
    checker: str, answer: str, kind: str
) -> None:
    assert checked(answer).kind == kind


BROKEN = """
import os, numpy as np
def typo(answer, row): return anwser == 1
def helper(answer, row):
    # What fails is the checker's own, though the answer calls it.
    exec(answer, {"h": lambda: unknown})
def nothing(answer, row): pass
def text(answer, row): return "False"
def items(answer, row): return [True]
def leaves(answer, row): raise SystemExit(0)
def asserts(answer, row): assert answer == "no"
def command(answer, row):
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "1 / 0"], check=True)
def array(answer, row): return np.array([1]).any()
def number(answer, row): return 1
async def later(answer, row): return True
def one_by_one(answer, row): yield True
value = 5
"""


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("typo", "failed", "NameError: name 'anwser' is not defined"),
        ("helper", "failed", "NameError: name 'unknown' is not defined"),
        ("nothing", "failed", "TypeError: the checker returned NoneType, which is neither True nor False"),
        ("text", "failed", "TypeError: the checker returned str, which is neither True nor False"),
        ("items", "failed", "TypeError: the checker returned list, which is neither True nor False"),
        ("leaves", "failed", "SystemExit: 0"),
        ("asserts", "wrong", ""),
        ("command", "wrong", ""),
        ("array", "right", ""),
        ("number", "right", ""),
    ],
)
def test_a_checker_that_fails_is_told_from_an_answer_that_is_wrong(
    checker: str, name: str, kind: str, said: str
) -> None:
    found = checked("h()", f"broken:{name}", memory_mb=4096)
    assert (found.kind, found.text.rpartition("\n")[2]) == (kind, said)


def test_a_checker_that_cannot_be_imported_has_failed(tmp_path: Path, checker: str) -> None:
    (tmp_path / "heavy.py").write_text("held = 'x' * 2 ** 31")
    (tmp_path / "asserting.py").write_text("assert False")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)")
    for name, seconds, said in (
        ("heavy", 60, "MemoryError"),
        ("asserting", 60, "AssertionError"),
        ("slow", 2, "it took more than 2 seconds"),
    ):
        found = checked("", f"{name}:check", seconds=seconds)
        assert (found.kind, said in found.text) == ("failed", True)


def test_a_traceback_is_masked_and_bounded(tmp_path: Path, checker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a" * 30
    (tmp_path / "loud.py").write_text(
        f"def check(answer, row):\n    raise ValueError('x' * 10**6 + chr(27) + '[1m {token}')\n"
    )
    text = checked("", "loud:check").text
    assert len(text) < 4000
    assert token not in text
    assert chr(27) not in text


# Ways to a verdict that take no more than a few lines.
FORGED = [
    "import __main__, os, sys\nos.write(int(sys.argv[1]), f'{__main__.word} True'.encode())",
    "import builtins\nbuiltins.bool = builtins.isinstance = lambda *_: True\ndef f(x): return 0",
    "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'True')\n    except OSError: pass\ndef f(x): return 0",
    # Every text that can be reached from frames, modules and the collector.
    """import gc, os, re, sys
held = [repr(one) for one in gc.get_objects()]
frame = sys._getframe()
while frame:
    held += [repr(frame.f_locals), repr(frame.f_globals)]
    frame = frame.f_back
for word in {w for text in held for w in re.findall(r'[0-9a-f]{32}', text)}:
    for fd in range(3, 20):
        try: os.write(fd, f'{word} True'.encode())
        except OSError: pass
os._exit(0)""",
]


@pytest.mark.parametrize("answer", FORGED)
def test_an_answer_does_not_write_its_own_verdict_in_a_few_lines(checker: str, answer: str) -> None:
    assert checked(answer).kind in ("wrong", "ended")


def test_a_checker_has_its_limits_and_a_home_of_its_own(checker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/some/bin:/more/bin")
    assert check_answer(checker, "environment", {"path": "/some/bin:/more/bin"}, **LIMITS).kind == "right"
    # Bytes of memory, seconds of computing, bytes of a file, and no core.
    row = {"limits": [[2**30] * 2, [61] * 2, [2**26] * 2, [0] * 2]}
    assert check_answer(checker, "limits", row, seconds=59.5, memory_mb=1024).kind == "right"


def test_a_checker_is_found_where_this_process_finds_it_and_dates_of_a_row_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_check.py").write_text("def right(answer, row): return answer == row['day']")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check_answer("their_check:right", "2026-11-28", {"day": date(2026, 11, 28)}, **LIMITS)
    assert found.kind == "right"


def next_files() -> list[int]:
    """The numbers that the next open files get."""
    found = [os.dup(0) for _ in range(3)]
    for one in found:
        os.close(one)
    return found


# The child holds a lock until it is gone.
HOLD = """import fcntl, os, time
def hold():
    global held
    held = open({lock!r}, 'w')
    fcntl.flock(held, fcntl.LOCK_EX)
    open('held', 'w')
def wait():
    while not os.path.exists('held'): time.sleep(0.01)
"""
SAME = "if not os.fork():\n    hold(); time.sleep(100)\nwait()\n"
SESSIONS = """if not os.fork():
    os.setsid()
    if not os.fork():
        hold()
        number = 0
        while True:
            open(f"file-{number % 50}", "w").write("x")
            number += 1
    os._exit(0)
wait()
"""
# In a namespace there is nothing above that could be killed.
KILLER = """if not os.fork():
    os.setsid(); hold(); time.sleep(100)
wait()
if os.getppid() > 1: os.kill(os.getppid(), 9)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SAME, id="of its session"),
        pytest.param(SESSIONS, id="of another session"),
        pytest.param(KILLER, id="of one that ends its supervisor"),
    ],
)
@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone finds them")
def test_no_process_of_an_answer_is_left(
    checker: str, tmp_path: Path, code: str, namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not namespaces:
        # As in most containers.
        head, found, rest = Path(checking.__file__).read_text().partition('if sys.platform != "linux":')
        (tmp_path / "without.py").write_text(f"{head}if True:{rest}")
        assert found
        monkeypatch.setattr(checking, "__file__", str(tmp_path / "without.py"))
    unused = next_files()
    lock = tmp_path / "lock"
    lock.touch()
    found = checked(f"{HOLD.format(lock=str(lock))}{code}{GOOD}")
    assert found.left == ()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert next_files() == unused, "an open file is left"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')",
        "os.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
        # In its place, a link to what is the user's.
        "here = os.getcwd()\nos.chdir('/')\nos.rmdir(here)\nos.symlink({kept!r}, here)",
    ],
    ids=["deep", "locked", "link"],
)
def test_whatever_an_answer_leaves_is_removed(
    checker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    found = checked(f"import os\n{code.format(kept=str(tmp_path / 'kept'))}\n{GOOD}")
    assert (found.kind, found.left) == ("right", ())
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (tmp_path / "kept" / "file").exists()


def test_what_cannot_be_removed_is_mentioned(checker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = score(checker=checker, run_code=True)
    found.statistics([Answered((f"import os\nos.mkdir('d')\n{GOOD}",), "", ROW)])
    (note,) = found.notes  # type: ignore[attr-defined]
    what, _, left = note.partition(": ")
    assert what == "the checked code left what cannot be removed or ended"
    shutil.rmtree(left)


def test_what_a_checker_prints_is_not_seen(checker: str, capfd: pytest.CaptureFixture[str]) -> None:
    # What is left in a buffer is lost with the process.
    noisy = f"import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\n{GOOD}"
    assert checked(noisy).kind == "right"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 9))\nwhile True: pass", "time"),
        ("f = 'x' * 2 ** 33", "memory"),
        ("open('big', 'w').write('x' * 2 ** 27)", "wrong"),
    ],
)
def test_code_that_takes_too_much_ends(checker: str, answer: str, kind: str) -> None:
    assert checked(answer, seconds=60, memory_mb=512).kind == kind


def test_code_that_only_waits_ends_too(checker: str) -> None:
    # On a busy machine the checker itself may need longer to start.
    kinds = (checked("import time\ntime.sleep(100)", seconds=seconds).kind for seconds in (1, 5, 25))
    assert next(kind for kind in kinds if kind != "failed") == "time"


def test_checks_that_were_not_decided_are_counted_apart_and_all_failing_is_an_error(checker: str) -> None:
    found = score(checker=checker, run_code=True, seconds=60, attempts=5)
    answers = (GOOD, "def f(x): return x", "f = 'x' * 2 ** 33", "import os\nos._exit(0)", "g = 1")
    found.statistics([Answered(answers, "", ROW)])
    counts: dict[str, Any] = found.counts  # type: ignore[attr-defined]
    failure = counts.pop("first_failure")
    assert counts == {"right": 1, "wrong": 1, "failed": 1, "time": 0, "memory": 1, "ended": 1}
    assert failure.startswith("Traceback")
    (note,) = found.notes  # type: ignore[attr-defined]
    assert note.startswith(
        "of 5 checks 1 failed, 1 ran out of memory, 1 ended without a verdict: counted as not passed; "
        "the first failure: KeyError: 'f' (File "
    )
    with pytest.raises(ConfigError, match=r"the checker failed at every answer \(2\): KeyError: 'f'") as caught:
        found.statistics([Answered(("g = 1", "h = 2"), "", ROW)])
    assert caught.value.problems[0].startswith("Traceback")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "checker"),
        ({"checker": "my_check:check"}, "run_code"),
        ({"checker": "my_check:check", "run_code": True, "k": 2}, "attempts"),
        ({"checker": "no_such:check", "run_code": True}, "checker"),
        *(({"checker": f"broken:{name}", "run_code": True}, "checker") for name in ("value", "later", "one_by_one")),
    ],
)
def test_code_is_run_only_where_everything_was_asked_for(checker: str, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        score(**settings)
    assert caught.value.where == f"evaluation.scoring.{field}"
