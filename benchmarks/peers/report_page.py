"""Write the report of 20 long runs, open it in headless Chromium, and measure how soon it answers."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measuring

# `tests.support` writes the runs, and drives the browser.
sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.browser import PATIENCE, chromium
from tests.support.recorded import write_large

from finray.reporting.report import report

# Each resolves when what it did is painted.
PAINTED = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));"
TYPE = """const field = document.querySelector('[data-part=text]');
field.value = {text!r}; field.dispatchEvent(new Event('input', {{bubbles: true}}));"""
ACTIONS = {
    "search": TYPE.format(text="1: 4000 said"),
    "filter": TYPE.format(text="") + "document.querySelector('input[value=win]').click();",
    "next rows": "document.querySelector('[data-part=next]').click();",
    "zoom": "document.querySelector('[aria-label=\"Zoom in\"]').click();",
    "hover": """const over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
const place = {bubbles: true, clientX: box.x + box.width / 3, clientY: box.y + 50};
over.dispatchEvent(new MouseEvent('mousemove', place));""",
}


@dataclass(frozen=True)
class Page:
    """Where the runs and the page are written."""

    folder: str


def main() -> None:
    """Measure, and print seconds by what is done."""
    folder = Path(measuring.job(Page).folder)
    file = folder / "page.html"
    report(write_large(folder), file)
    found = {"megabytes": file.stat().st_size / 1e6}
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PATIENCE)

        def act(name: str, code: str) -> None:
            began = time.perf_counter()
            page.evaluate(f"async () => {{ {code} {PAINTED} }}")
            found[name] = time.perf_counter() - began

        began = time.perf_counter()
        page.goto(file.as_uri())
        found["page"] = time.perf_counter() - began
        act("first search", TYPE.format(text="0: 17 said"))
        page.locator("figure.plot[aria-busy=true]").first.wait_for(state="detached")
        found["drawn"] = time.perf_counter() - began
        for name, code in ACTIONS.items():
            act(name, code)
        # What was done has been done.
        width = page.evaluate("(({min, max}) => max - min)(document.querySelector('figure.plot').plot.scales.x)")
        value = page.locator("figure.plot .u-value").first.inner_text()
        rows = page.locator("#answers [data-part=status]").inner_text()
        assert width < 6000, width
        assert value != "–", value
        assert rows.startswith("6 to 10 of"), rows
    measuring.emit(found, "playwright")


if __name__ == "__main__":
    main()
