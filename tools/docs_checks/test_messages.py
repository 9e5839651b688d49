"""Messages that docs/guide/troubleshooting.md explains are those that finray prints.

A message is what stands in bold there, as code. `...`, `N` and `M` in it, and what an f-string puts in, may be
anything.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8").split())
QUOTED = [quote for bold in re.findall(r"\*\*(`[^*]+`)\*\*", PAGE) for quote in re.findall(r"`([^`]+)`", bold)]
# As many characters of a quote have to stand in the source itself.
LITERAL = 0.6


@cache
def texts() -> list[list[str]]:
    """Every text of finray's source, as the pieces between which values are put."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append([node.value])
            elif isinstance(node, ast.JoinedStr):
                pieces = [""]
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        pieces[-1] += str(part.value)
                    else:
                        pieces.append("")
                found.append(pieces)
    return found


def most_literal(pieces: list[str], wanted: str) -> int:
    """How many characters of ``wanted`` are a text's own where it is part of that text; -1 where it is not."""

    def after_value(index: int, rest: str) -> int:
        piece = pieces[index]
        if piece and rest.startswith(piece) and index + 1 < len(pieces):
            longer = max((after_value(index + 1, rest[at:]) for at in range(len(piece), len(rest) + 1)), default=-1)
            if longer >= 0:
                return len(piece) + longer
        return len(rest) if piece.startswith(rest) else -1

    best = -1
    for index, piece in enumerate(pieces):
        if wanted in piece:
            return len(wanted)
        if index:
            best = max(best, *(after_value(index, wanted[at:]) for at in range(len(wanted) + 1)))
        for taken in range(len(piece) if index + 1 < len(pieces) else 0, 0, -1):
            if wanted.startswith(piece[-taken:]):
                for at in range(taken, len(wanted) + 1):
                    if (rest := after_value(index + 1, wanted[at:])) >= 0:
                        best = max(best, taken + rest)
    return best


def is_said(quote: str) -> bool:
    """Whether finray can print this."""
    parts = [part.strip() for part in re.split(r"\.\.\.|\b[NM]\b", quote)]
    return all(
        any(most_literal(pieces, part) >= LITERAL * len(part) for pieces in texts()) for part in parts if len(part) > 2
    )


@pytest.mark.parametrize("quote", QUOTED)
def test_a_message_that_is_explained_is_printed(quote: str) -> None:
    assert is_said(quote)


def test_a_message_that_nobody_prints_is_seen() -> None:
    """The negative control: another word in the middle."""
    assert len(QUOTED) > 15
    assert any("N " in quote for quote in QUOTED)
    for quote in QUOTED:
        words = quote.split(" ")
        words[len(words) // 2] = "zebras"
        assert not is_said(" ".join(words))
