"""The tool: which errors it makes, which tests it picks, and that stale entries of its lists are reported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.mutants import reach
from tools.mutants.__main__ import ROOMS, is_harmless, judged, known_errors, stale_entries
from tools.mutants.operators import all_candidates, is_python, mutants

ROOT = Path(__file__).parents[2]


def changes(text: str) -> set[str]:
    """Every mutant of a text, as the lines that differ."""
    source = text.encode()
    return {mutant.applied(source).decode() for mutant in mutants("x.py", text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a):\n    return a < 1\n", {"a <= 1", "a >= 1", "a < 2", "a < 0"}),
        ("def f(a, b):\n    return a not in b\n", {"a in b"}),
        ("def f(a, b):\n    return a + b // 2\n", {"a - b // 2", "a + b * 2", "a + b // 3", "a + b // 1"}),
        ("def f(a, b):\n    return a and not b\n", {"a or not b", "not b", "a", "a and b"}),
        ("def f(a):\n    return a['key']\n", {"a['key_']"}),
        ("def f(a):\n    return a.get('key', 'text')\n", {"a.get('key_', 'text')", "a.get('text', 'key')"}),
        ("def f(a):\n    return a[1:]\n", {"a[:]", "a[2:]", "a[0:]"}),
        ("def f(a, b):\n    return min(a, b)\n", {"max(a, b)"}),
        ("def f(a):\n    return all(one for one in a if one)\n", {"any(one for one in a if one)"} | {
            f"all(one for one in a if {value})" for value in ("True", "False")}),
        ("def f(a):\n    return open(a, mode='w')\n", {"open(a)"}),
        ("def f(a):\n    return dict(x=a, y=a)\n", {"dict(y=a)", "dict(x=a)"}),
        ("def f(a):\n    return a if a.b else 'text'\n", {"a if True else 'text'", "a if False else 'text'"}),
        ("def f(a=True):\n    return a\n", {"a=False"}),
    ],
)  # fmt: skip
def test_expressions_and_what_is_made_of_them(text: str, expected: set[str]) -> None:
    shown = next(line for line in reversed(text.splitlines()) if "=True" in line or "return" in line)
    if "=True" in text:
        assert changes(text) == {"def f(a=False):\n    return a\n"}
    else:
        assert changes(text) == {text.replace(shown, f"    return {one}") for one in expected}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("a.b(1)", {"pass", "a.b(2)", "a.b(0)"}),
        ("a.b = c", {"pass"}),
        ("a += c", {"pass", "a = c", "a -= c"}),
        ("raise ValueError(f'{a} is {1 + 1}')", {"pass"}),
    ],
)
def test_statements_and_what_is_made_of_them(statement: str, expected: set[str]) -> None:
    before = "def f(a, c):\n    "
    assert changes(f"{before}{statement}\n") == {f"{before}{one}\n" for one in expected}


def test_branches_are_always_or_never_taken_and_errors_not_caught() -> None:
    text = "def f(a):\n    try:\n        if a:\n            return a\n    except OSError:\n        return None\n"
    assert changes(text) == {
        text.replace("if a", "if True"),
        text.replace("if a", "if False"),
        text.replace("OSError", "()"),
    }


@pytest.mark.parametrize(
    "text",
    [
        '"""Words 1."""\n',
        "import a\nfrom b import c\n",
        "def f(a: Literal[1]) -> dict['x', 1]: ...\n",
        "def f(a):\n    a: Literal[1, 'x']\n    assert a == 1\n",
        "@dataclass(frozen=True)\nclass A:\n    __slots__ = ('a', 1)\n",
        "if TYPE_CHECKING:\n    a = 1\n",
        "def f(a):\n    logger.warning(a, 1, x=2)\n",
        "def f(a):\n    return FinrayError(f'{a - 1}', where=a['x'])\n",
        "class P(Protocol):\n    def f(self, a=1):\n        '''Words.'''\n",
        "def f(a):\n    return open(a, encoding='utf-8')\n",
        "def f(a):\n    return rmtree(a, ignore_errors=True)\n",
        "def f(a):\n    return Pool(max_workers=1 + a)\n",
    ],
)
def test_what_nobody_would_miss_is_left_alone(text: str) -> None:
    assert changes(text) == set()


def test_a_keyword_that_must_be_given_is_not_removed() -> None:
    text = "def g(*, x, y=None):\n    return x\ndef f():\n    return g(x=a, y=b)\n"
    removed = [one for one in all_candidates({"data/x.py": text}, ROOMS) if one.kind == "removed keyword"]
    assert [one.old for one in removed] == [", y=b"]


def test_every_mutant_of_a_room_is_python_and_differs() -> None:
    texts = reach.sources()
    own = {name: text for name, text in texts.items() if name.startswith("checkpoint/")}
    statements = {name: spans(text) for name, text in own.items()}
    found = 0
    for mutant in all_candidates(own, ROOMS):
        source = own[mutant.file].encode()
        changed = mutant.applied(source)
        # Only the statement of the file that it is in is parsed again: all would take long.
        ((start, end, before),) = [one for one in statements[mutant.file] if one[0] <= mutant.start < one[1]]
        assert mutant.end <= end, mutant
        try:
            body = ast.parse(changed[start : end + len(changed) - len(source)]).body
        except SyntaxError:
            assert not is_python(mutant, own[mutant.file]), mutant
            continue
        found += 1
        assert len(body) == 1, mutant
        assert ast.dump(body[0]) != before, mutant
    assert found > 200


def spans(text: str) -> list[tuple[int, int, str]]:
    """Where each statement of a file begins and ends, in bytes, and what it is."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        found.append((starts[first - 1], starts[node.end_lineno or 0], ast.dump(node)))
    return found


def test_lines_are_followed_through_a_change() -> None:
    """Lines before and after an edit are found again; those that are new belong to their neighbours' tests."""
    followed = reach.follow(["a", "b", "c", "d"], ["new", "a", "b", "x", "y", "d"])
    assert set(followed[4]) >= {6}
    assert set(followed[3]) == {4, 5}
    assert 4 in followed[2]
    assert set(followed[1]) == {1, 2}


def test_tests_are_picked_by_line_quick_and_narrow_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "tests/unit/training/test_schedule.py"
    text = "LIMIT = 5\n\n\ndef f(a, b=1):\n    if a:\n        return LIMIT\n    return b\n"
    monkeypatch.setattr(reach, "STATE", tmp_path)
    monkeypatch.setattr(reach, "sources", lambda: {"data/x.py": text})
    lines = {"slow": ["5", "6"], "quick": ["5", "6"], "other": ["5", "7"]}
    reach.keep(
        file,
        {
            "passed": [*lines, "failed_in_teardown"],
            "bad": {"failed_in_teardown": ""},
            "seconds": {"slow": 2.0, "quick": 0.1, "other": 0.2, "failed_in_teardown": 0.1},
            "lines": {name: [f"data/x.py:{line}" for line in found] for name, found in lines.items()},
        },
    )
    known = reach.Reach({"data/x.py": text})
    picked = {(one.kind, one.old): list(known.of(one)) for one in mutants("data/x.py", text)}
    assert picked["condition", "a"] == ["quick", "other", "slow"]
    assert picked["constant", "1"] == ["quick", "other", "slow"], "the default of an argument: the whole function"
    assert picked["constant", "5"] == ["quick", "slow"], "a constant: who uses its name"
    named = "tools/mutants/test_mutants.py::test_tests_are_picked_by_line_quick_and_narrow_ones_first[a case]"
    known.seconds[named] = 0.3
    constant = next(one for one in mutants("data/x.py", text) if one.old == "5")
    assert set(known.of(constant)) == {"quick", "slow", named}, "and the tests that name it, as this one does: LIMIT"


# --- the lists ------------------------------------------------------------------------------------------------------


def test_an_entry_that_no_longer_fits_the_code_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is: entries that fit are not."""
    test = "tests/unit/training/test_schedule.py"
    good = {
        "name": "good",
        "file": "src/finray/errors.py",
        "find": "class FinrayError(",
        "replace": "",
        "tests": [test],
    }
    bad = [
        {**good, "name": "text", "find": "no such text"},
        {**good, "name": "code", "file": "src/finray/no_such.py"},
        {**good, "name": "file", "tests": ["tests/unit/test_no_such.py"]},
        {**good, "name": "test", "tests": [f"{test}::test_no_such[x]"]},
    ]
    monkeypatch.setattr("tools.mutants.__main__.known_errors", lambda: [good, *bad])
    monkeypatch.setattr("tools.mutants.__main__.judged", lambda: [{"file": "errors.py", "source": "no such text"}])
    assert [entry.partition(":")[0] for entry in stale_entries()] == [
        *(f"known error '{error['name']}'" for error in bad),
        "harmless",
    ]


def test_entries_have_a_name_of_their_own_or_a_reason() -> None:
    names = [error["name"] for error in known_errors()]
    assert len(names) == len(set(names))
    assert all(error["tests"] and error["find"] != error["replace"] for error in known_errors())
    assert all(len(one["why"]) > 10 for one in judged())


def test_a_judgement_is_of_a_line_and_of_its_changes_or_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"file": "a.py", "source": "x = 1"}
    result = {**line, "change": "1 -> 2", "outcome": "survived"}
    for change, expected in (("1 -> 2", True), ("1 -> 0", False), (["1 -> 0", "1 -> 2"], True), (["1 -> 0"], False)):
        monkeypatch.setattr("tools.mutants.__main__.judged", lambda change=change: [{**line, "change": change}])
        assert is_harmless(result) is expected
    monkeypatch.setattr("tools.mutants.__main__.judged", lambda: [line])
    assert is_harmless(result)
    assert not is_harmless({**result, "file": "b.py"})
    assert not is_harmless({**result, "source": "y = 1"})


# --- a run ----------------------------------------------------------------------------------------------------------


def test_an_error_is_noticed_and_an_edit_that_changes_nothing_is_not(tmp_path: Path) -> None:
    """The whole runner, on one file of tests that is quick: with a negative control, and the source left as it was."""
    script = """
import json, sys
# What both children would import.
import hypothesis, pytest, torch, transformers.models.llama.modeling_llama
from tools.mutants.__main__ import Job, run_all
file, name = "training/schedule.py", "tests/unit/training/test_schedule.py"
text = open(f"src/finray/{file}", "rb").read()
found = {}
def job(case, change):
    def tell(result, seconds):
        found[case] = result["code"]
    return Job(case, [name], {name: 1.0}, (file, change), 200, tell)
jobs = [job("error", text + b"\\ndel learning_rate\\n"), job("nothing", text + b"\\n# A comment.\\n")]
run_all(iter(jobs), processes=1)
print(json.dumps(found))
"""
    copies = tmp_path / "copies"
    copies.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(copies)}
    # torch makes this directory when it is imported, and keeps it.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == '{"error": 2, "nothing": 0}', done.stderr
    assert not list(copies.iterdir()), "its copies of the source are gone"
