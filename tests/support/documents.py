"""The shell blocks of README.md and docs/guide."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCED = re.compile(r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```[ ]*$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->\n\s*$")
SHELLS = ("", "shell", "bash", "sh", "console")
COMMAND = re.compile(r"^\s*(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:finray|make|python3?|pip) .*)$")


@dataclass(frozen=True)
class Block:
    """The commands of one fenced block, comments and all.

    Attributes:
        page: file name of the page.
        line: where the block begins.
        needs: what it needs that a test has not: the names in an HTML comment just above it, `gpu`, `network`, `hosts`.
    """

    page: str
    line: int
    needs: frozenset[str]
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that hold commands; a backslash continues a line, and other lines are output."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fenced in FENCED.finditer(text):
        lines = fenced[2].replace("\\\n", " ").splitlines()
        commands = tuple(match[1] for line in lines if (match := COMMAND.match(line)))
        if fenced[1] in SHELLS and commands:
            before = text[: fenced.start()]
            needs = NEEDS.search(before)
            names = re.split(r"[ ,]+", needs[1]) if needs else ()
            found.append(Block(page.name, before.count("\n") + 1, frozenset(names), commands))
    return found
