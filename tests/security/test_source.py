"""Rules about the source that no linter of ours expresses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "finray"
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "pickle.load", "pickle.loads", "os.system"}


def calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield node.lineno, name


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    found = [f"{path}:{line} {name}" for line, name in calls(path) if name in FORBIDDEN_CALLS]
    assert not found


def test_the_rule_can_see() -> None:
    tree = "import torch\ntorch.load('x')\n"
    assert [ast.unparse(node.func) for node in ast.walk(ast.parse(tree)) if isinstance(node, ast.Call)] == [
        "torch.load"
    ]


def test_trust_remote_code_is_off_unless_a_run_says_so() -> None:
    from finray.config.schema import ModelConfig

    assert ModelConfig(name="m").trust_remote_code is False
