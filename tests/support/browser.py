"""Headless Chromium, driven by Playwright; it uses the Chromium of the machine and downloads none."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

INSTALL = "`INSTALL=1 make browser` installs it as root on Debian"
# Milliseconds that anything may take; a machine that has other work is slow.
PATIENCE = 120_000
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find_chromium() -> str | None:
    """The program, from the environment variable CHROMIUM or the path."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser.

    Raises:
        FileNotFoundError: there is none on this machine.
    """
    program = find_chromium()
    if program is None:
        raise FileNotFoundError(f"no Chromium: {INSTALL}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=list(FLAGS), timeout=PATIENCE)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, what it asked for, and what it wrote to the console: warnings, errors and violations of its policy."""

    page: Page
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)


@contextmanager
def opened(
    browser: Browser, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", scale: float = 1
) -> Iterator[Opened]:
    """A file in a new page of its own, when all of its plots are drawn."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=scale,
    )
    page.set_default_timeout(PATIENCE)
    found = Opened(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.console.append(str(error)))
    page.goto(file.resolve().as_uri())
    page.locator("figure.plot[aria-busy=true]").first.wait_for(state="detached")
    yield found
    page.close()


def require_sound(found: Opened, file: Path, width: int) -> None:
    """See that a page fits, has asked for nothing and has no serious fault of accessibility."""
    assert found.page.evaluate("document.documentElement.scrollWidth") == width
    assert found.requests == [file.resolve().as_uri()]
    assert found.console == []
    for details in found.page.locator("details").all():
        details.evaluate("one => { one.open = true; }")
    assert violations(found.page) == []


def luminance(colour: Sequence[float]) -> float:
    """Of red, green and blue from 0 to 255, as WCAG 2.2 has it."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two colours; text needs 4.5, and a part of a plot 3."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def violations(page: Page) -> list[str]:
    """What axe-core finds to be serious or critical, each with the elements."""
    spec = importlib.util.find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['impact']} {one['id']}: {[node['target'] for node in one['nodes'][:5]]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
