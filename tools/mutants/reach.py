"""Which tests reach a line, and how long they take: from one traced run of every test file."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tools.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".mutants"
# Nothing of the rooms depends on what these see, or they take minutes.
LEFT_OUT = (
    "tests/unit/reporting",
    # Exceptions that are thrown into a thread do not get past a trace function: they never end.
    *("tests/unit/data/test_limits_of_outside_code.py", "tests/unit/test_limits.py"),
    # Traced, it did not end in twenty minutes either.
    "tests/unit/inspection/test_inspect.py",
)
FOLDERS = ("tests/unit", "tests/training", "tests/distributed")
INTEGRATION = (
    "tests/journeys/test_after_training.py",
    *(f"tests/integration/test_{name}.py" for name in ("families", "reference", "bad_input", "cache_cli", "plan_cli")),
)


def sources() -> dict[str, str]:
    """The text of every file, by its path under `src/finray`."""
    root = ROOT / "src" / "finray"
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}


def test_files() -> list[str]:
    found = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    found += [name for name in INTEGRATION if (ROOT / name).exists()]
    return sorted(name for name in found if not name.startswith(LEFT_OUT))


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def place(file: str) -> Path:
    """Where what is known of a test file is kept."""
    return STATE / "map" / f"{file.removeprefix('tests/').replace('/', '.')}.json"


def is_known(file: str) -> bool:
    """Whether a test file is as it was when it was traced. If only the source has changed since, lines are followed."""
    path = place(file)
    return path.exists() and json.loads(path.read_text())["test"] == sha((ROOT / file).read_text(encoding="utf-8"))


def keep(file: str, outcome: Mapping[str, Any]) -> int:
    """Write down the tests of a file that passed, their seconds and lines; returns how many there are."""
    tests = [name for name in outcome["passed"] if name not in outcome["bad"]]
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, name in enumerate(tests):
        for source, _, line in (one.rpartition(":") for one in outcome["lines"].get(name, [])):
            lines[source][line].append(number)
    texts = {source: text for source, text in sources().items() if source in lines}
    (STATE / "map").mkdir(parents=True, exist_ok=True)
    (STATE / "sources").mkdir(exist_ok=True)
    for text in texts.values():
        (STATE / "sources" / sha(text)).write_text(text, encoding="utf-8")
    content = {
        "test": sha((ROOT / file).read_text(encoding="utf-8")),
        "tests": [[name, outcome["seconds"][name]] for name in tests],
        "sources": {source: sha(text) for source, text in texts.items()},
        "lines": {source: lines[source] for source in texts},
    }
    place(file).write_text(json.dumps(content))
    return len(tests)


class Reach:
    """What all test files that exist and were traced reach in the source as it is now."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.seconds: dict[str, float] = {}
        self.size: Counter[str] = Counter()
        self._bodies: dict[str, dict[str, str]] = {}
        # By line: names of a file's tests, and the numbers of those that run the line.
        self.tests: dict[tuple[str, int], list[tuple[list[str], list[int]]]] = defaultdict(list)
        followed: dict[tuple[str, str], dict[int, list[int]]] = {}
        for file in test_files():
            if not place(file).exists():
                continue
            content = json.loads(place(file).read_text())
            names = [name for name, _ in content["tests"]]
            self.seconds |= dict(content["tests"])
            size = [0] * len(names)
            for source, found in content["lines"].items():
                key = (source, content["sources"][source])
                if source in texts and key not in followed:
                    old = (STATE / "sources" / key[1]).read_text(encoding="utf-8")
                    followed[key] = follow(old.splitlines(), texts[source].splitlines())
                for line, numbers in found.items():
                    for number in numbers:
                        size[number] += 1
                    for now in followed.get(key, {}).get(int(line), []):
                        self.tests[source, now].append((names, numbers))
            self.size.update(dict(zip(names, size, strict=True)))

    def at(self, source: str, line: int) -> set[str]:
        """The tests that run a line."""
        return {names[number] for names, numbers in self.tests.get((source, line), []) for number in numbers}

    def body(self, name: str) -> str:
        """The text of a test: one that names a constant looks at its value."""
        file, _, test = name.partition("[")[0].partition("::")
        if file not in self._bodies:
            path = ROOT / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            own = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            lines = text.splitlines()
            self._bodies[file] = {one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno]) for one in own}
        return self._bodies[file].get(test.rpartition("::")[2], "")

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Seconds of the tests that run the mutant, by test; first those that are quick and reach little else."""
        found: set[str] = set()
        for line in range(mutant.lines[0], mutant.lines[1] + 1):
            found |= self.at(mutant.file, line)
        if mutant.names:
            word = re.compile(rf"\b({'|'.join(mutant.names)})\b")
            for source, text in self.texts.items():
                for line, content in enumerate(text.splitlines(), start=1):
                    if word.search(content):
                        found |= self.at(source, line)
            found |= {name for name in self.seconds if word.search(self.body(name))}
        ordered = sorted(found, key=lambda name: (self.seconds[name] + 0.05) * self.size[name])
        # Not many cases of one test before the first of another.
        seen: Counter[str] = Counter()
        rank = {}
        for name in ordered:
            rank[name] = seen[name.partition("[")[0]] // 3
            seen[name.partition("[")[0]] += 1
        return {name: self.seconds[name] for name in sorted(ordered, key=lambda name: rank[name])}


def follow(old: list[str], new: list[str]) -> dict[int, list[int]]:
    """Where the lines of a text are in a later one (from 1). New lines belong to those that they replace, or stand
    next to."""
    found: dict[int, list[int]] = defaultdict(list)
    for kind, a, b, c, d in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if kind == "equal":
            for one, other in zip(range(a, b), range(c, d), strict=True):
                found[one + 1].append(other + 1)
        else:
            for one in range(max(a - 1, 0), min(b + 1, len(old))):
                found[one + 1] += range(c + 1, d + 1)
    return found
