"""The result of a command: one object that Python returns, a notebook shows and ``--json`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import rich.table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from finray.config.redact import redact_text
from finray.errors import DataError

_WIDTH = 110
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class AsIs:
    """Text that a user asked for, such as rows and answers: a :class:`PlainConsole` masks no secret in it."""

    def __init__(self, text: Text | str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As Rich's."""
        text = Text(_plain(self.text)) if isinstance(self.text, str) else self.text
        yield from text.__rich_console__(console, options)


class PlainConsole(Console):
    """A console on which text is text, wherever it comes from: brackets are no markup, colons no emoji, what would
    control the terminal, or is no Unicode, is shown by its code point, and secrets are masked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text for the screen, from a string."""
        return super().render_str(redact_text(_plain(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments for the screen."""
        if isinstance(renderable, Text) and (shown := redact_text(renderable.plain)) != renderable.plain:
            renderable = Text(shown, style=renderable.style, end=renderable.end)
        return super().render(renderable, options)


def _plain(text: str) -> str:
    return _CONTROL.sub(lambda match: f"<U+{ord(match[0]):04X}>", text.replace("\r\n", "\n"))


class Table(rich.table.Table):
    """A table in which what is too long for its column continues below: a number that is cut off is another number."""

    def add_column(self, *header: Any, **options: Any) -> None:
        """As Rich's."""
        super().add_column(*header, **{"overflow": "fold", **options})


def print_labelled(console: Console, texts: Iterable[tuple[str, str]]) -> None:
    """Texts below each other, each after its label."""
    console.rule(style="dim")
    for label, text in texts:
        console.print(f"{label:>9} ", style="bold", end="", highlight=False)
        console.print(AsIs(text.strip()), highlight=False, soft_wrap=True)


class Result:
    """A frozen record that shows itself."""

    __slots__ = ()

    # Names in `plain` of what is printed as it is: prompts and answers. Elsewhere, secrets are masked.
    AS_IS: ClassVar[tuple[str, ...]] = ()

    def plain(self) -> dict[str, Any]:
        """All of it as JSON types: what ``--json`` writes."""
        raise NotImplementedError

    def print(self, console: Console) -> None:
        """For a person, as the command line prints it."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook, which asks for this name."""
        console = PlainConsole(file=StringIO(), record=True, width=_WIDTH, force_jupyter=False)
        self.print(console)
        page = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True, clear=False)
        return {"text/plain": console.export_text(), "text/html": page}


class RowsResult(Result):
    """A result with one row per input."""

    __slots__ = ()

    def rows(self) -> list[dict[str, Any]]:
        """The rows as JSON types."""
        raise NotImplementedError

    def write(self, path: Path) -> None:
        """Write the rows as JSON lines.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise DataError(f"the rows cannot be written: {error.strerror}", where=str(path)) from None
