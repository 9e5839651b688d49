"""Rules about the source that no linter of ours expresses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.source import FILES, calls, imported

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "pickle.load", "pickle.loads", "os.system", "__import__"}
IMPORTERS = {"importlib.import_module", "importlib.util.find_spec"}


def forbidden(source: str, *, ray: bool) -> Iterator[str]:
    """Calls that are not allowed, whatever a name was imported as; with ``ray``, imports of Ray by name too."""
    known = imported(source)
    for _, node in calls(source):
        head, dot, rest = ast.unparse(node.func).partition(".")
        name = known.get(head, head) + dot + rest
        words = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: {name}"
        elif ray and name in IMPORTERS and any(word.partition(".")[0] == "ray" for word in words):
            yield f"line {node.lineno}: {name}({words[0]})"


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_unpickled_or_evaluated_and_ray_is_imported_by_its_room_alone(file: str) -> None:
    assert list(forbidden(FILES[file], ray=not file.startswith("runtime/"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x')",
        "from torch import load as anything\nanything('x')",
        "import torch as t\nt.save(1, 'x')",
        "def f():\n    __import__('ray')",
        "import importlib\nimportlib.import_module('ray.train')",
        "from importlib import import_module as of\nof('ray')",
        "eval('1')",
    ],
)
def test_the_rule_can_see(source: str) -> None:
    assert len(list(forbidden(source, ray=True))) == 1


def test_the_rule_is_about_files_that_are_there() -> None:
    assert len(FILES) > 100
    assert (
        list(forbidden("import json\njson.load('x')\nimport importlib\nimportlib.import_module('ray')", ray=False))
        == []
    )
