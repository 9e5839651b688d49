"""The frame of a page: one self-contained HTML file with style, script and data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from finray.config.redact import redact, redact_text
from finray.errors import DataError
from finray.reporting.plots import Plot

_UPLOT = "vendor/uPlot.iife.min.js"


def render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """A page as HTML.

    Args:
        template: Jinja source that extends ``shell.html.j2`` and fills its blocks ``title``, ``style`` and ``body``.
            Values are escaped. Available are the filters ``number`` (1,234) and ``percent``, ``figure(plot)`` and
            ``data(name, value)``, and the macros of ``parts.html.j2``.
        scripts: files of this package to run besides that of the plots.
        values: variables of the template.
    """
    here = resources.files("finray.reporting")
    texts = {
        name: (here / name).read_text(encoding="utf-8")
        for name in ("shell.html.j2", "parts.html.j2", "page.css", _UPLOT, "vendor/uPlot.min.css", "plots.js", *scripts)
    }
    script = "".join(f"\n{texts[name]}" for name in (_UPLOT, "plots.js", *scripts))
    environment = Environment(
        loader=DictLoader({name: text for name, text in texts.items() if name.endswith(".j2")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters.update(number=lambda value: f"{value:,}", percent=percent)
    # With this policy a browser only runs our script and loads nothing, whatever the data injects into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        data=data,
        figure=figure,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
        script=Markup(script),
        theme=Markup(texts["vendor/uPlot.min.css"] + texts["page.css"]),
    )
    return environment.from_string(template).render(values)


def _finalized(value: Any) -> Any:
    """A value as it stands on a page, which is made to be shared: without secrets."""
    return redact_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def data(name: str, value: Any) -> Markup:
    """JSON data for the script of a page, as an element with an id."""
    # Compact, and with only ASCII characters, so that its length is its size.
    text = htmlsafe_json_dumps(redact(value, named=False), separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, text)


def write(html: str, file: Path) -> None:
    """Write a page. Raises DataError: the file cannot be written."""
    try:
        # A row may contain half of a surrogate pair; it is shown as an escape.
        file.write_text(html, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(f"the page cannot be written: {error.strerror}", where=str(file)) from None


def figure(plot: Plot, caption: str = "") -> Markup:
    """A plot as an element; ``caption`` is shown next to its title."""
    return Markup(
        '<figure class="plot"><figcaption><h3>{}</h3><span class="small quiet">{}</span></figcaption>'
        '<noscript>This plot needs JavaScript.</noscript><script type="application/json">{}</script></figure>'
    ).format(plot.title, caption, htmlsafe_json_dumps(plot.plain(), separators=(",", ":")))


def percent(share: float) -> str:
    """A share as text; it is 0% or 100% only if it is exactly that."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share > 0.9995:
        return "> 99.9%"
    return "< 0.1%" if share < 0.0005 else f"{share:.1%}"
