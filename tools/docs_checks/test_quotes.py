"""Code that the documentation quotes from finray stands in the file that it names.

A quote is a fenced Python block with its file in a comment on the line before: `<!-- from: src/finray/errors.py -->`.
Lines of `...` stand for what is left out; indentation may differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTE = re.compile(r"^[ ]*<!-- from: (\S+) -->\n[ ]*```python\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)


def missing_lines(page: str) -> list[str]:
    """Quoted lines that are not in the file that they are said to be from."""
    missing = []
    for path, quote in QUOTE.findall(page):
        source = {line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()}
        lines = [line.strip() for line in quote.splitlines()]
        missing += [f"{path}: {line}" for line in lines if line not in ("", "...") and line not in source]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_quoted_lines_stand_in_the_source(page: Path) -> None:
    assert missing_lines(page.read_text(encoding="utf-8")) == []


def test_a_line_that_is_gone_would_be_seen() -> None:
    """The negative control."""
    quote = "<!-- from: src/finray/errors.py -->\n```python\nclass FinrayError(Exception):\n    ...\n{}\n```\n"
    assert missing_lines(quote.format("    exit_code = 2")) == []
    assert missing_lines(quote.format("    exit_code = 3")) == ["src/finray/errors.py: exit_code = 3"]
