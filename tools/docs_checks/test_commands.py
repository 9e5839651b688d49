"""The programs understand every `finray ...` and `make ...` command in a fenced block of README, guide and examples.

The commands are parsed, not run: names of commands and options, and types of their values. They are run by
tests/journeys/test_docs_commands.py, those apart that need more than a test has.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main
from tests.support.documents import PAGES, ROOT, blocks, name_of

from finray.cli.main import app

TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands(page: Path) -> list[str]:
    """The commands of a page that are finray's or make's, without the environment in front of them."""
    every = [re.sub(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?", "", one) for block in blocks(page) for one in block.commands]
    return [one for one in every if one.startswith(("finray ", "make "))]


def understand(command: str) -> None:
    """Parse a command.

    Raises:
        click.ClickException, AssertionError: it is not understood.
    """
    name, *arguments = shlex.split(re.split(r"\s[|>&;]", command)[0], comments=True)
    if name == "make":
        wanted = [one for one in arguments if "=" not in one and not one.startswith((".", "-"))]
        assert set(wanted) <= TARGETS, f"no such target: {command}"
        return
    if arguments[-1:] == ["--help"]:
        arguments.pop()
    group: click.Command = typer.main.get_command(app)
    context = click.Context(group, info_name="finray")
    while hasattr(group, "resolve_command") and arguments:
        _, found, arguments = group.resolve_command(context, arguments)
        assert found is not None
        group = found
    group.make_context(group.name or "finray", list(arguments), resilient_parsing="--help" in command)


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_commands_are_understood(page: Path) -> None:
    problems = []
    for command in commands(page):
        try:
            understand(command)
        except Exception as error:
            problems.append(f"{command}: {getattr(error, 'message', None) or error}")
    assert problems == []


def test_commands_are_found_and_mistakes_in_them_seen() -> None:
    """The negative control."""
    assert sum(len(commands(page)) for page in PAGES) >= 20
    understand("finray train config.yaml train.max_steps=3 --fresh")
    understand("make quickstart MODEL=some/model")
    for wrong in ("finray trian config.yaml", "finray train config.yaml --frsh", "finray generate", "make quikstart"):
        with pytest.raises(Exception, match=r".+"):
            understand(wrong)
