"""What a command comes to: one object that Python gets, a notebook shows, a terminal prints and ``--json`` writes."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

_WIDTH = 110


class Result:
    """A frozen record that shows itself."""

    __slots__ = ()

    def plain(self) -> dict[str, Any]:
        """All of it as JSON types: what ``--json`` writes."""
        raise NotImplementedError

    def print(self, console: Console) -> None:
        """For a person, as the command line prints it."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook, which asks for this name."""
        console = Console(file=StringIO(), record=True, width=_WIDTH, force_jupyter=False, emoji=False)
        self.print(console)
        page = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True, clear=False)
        return {"text/plain": console.export_text(), "text/html": page}
