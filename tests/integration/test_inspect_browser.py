"""The page that `finray inspect --html` writes, opened in headless Chromium."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finray.inspection.inspect import inspect
from finray.inspection.measure import Inspection
from tests.support import browser as browsers
from tests.support import tiny
from tests.support.runs import cli, config_of, write_config

# What people with normal and with reduced sight need to read text (WCAG 2.2, level AA).
READABLE = 4.5
TOKEN = ".tokens .t[title]"


@pytest.fixture(scope="module")
def browser() -> Iterator[browsers.Browser]:
    program = browsers.find_chromium()
    if program is None:
        message = f"no Chromium: {browsers.INSTALL}"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    with browsers.Browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[Path, Inspection]:
    """The page of a small data set, written by the command, and what it was made from."""
    folder = tmp_path_factory.mktemp("inspect")
    rows = tiny.chat_rows(120)
    rows[7]["messages"][1]["content"] = "<script>document.title = 'stolen'</script>\n\tyes <b>no</b>"
    rows += [rows[3], rows[3], rows[90]]
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    plain = {
        "run": {"output_dir": str(folder)},
        "model": {"name": str(tiny_model_dir)},
        "data": {"source": str(source), "max_length": 128, "eval_ratio": 0.1},
    }
    page = folder / "page.html"
    config = write_config(plain, folder / "config.yaml")
    code, out, err = cli("inspect", str(config), "--html", str(page), "--row", "rows.jsonl:8", "--row", "0")
    assert code == 0, err
    assert f"wrote {page}" in out
    return page, inspect(config_of(plain), chosen=["rows.jsonl:8", "0"])


COLOURS = """(selector) => {
  const text = document.querySelector(selector);
  const fill = (one) => getComputedStyle(one).backgroundColor;
  let behind = text;
  while (fill(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
  return [getComputedStyle(text).color, fill(behind)];
}"""


def _colours(browser: browsers.Browser, selector: str) -> tuple[list[float], list[float]]:
    """Red, green and blue of text and of what is behind it, 0 to 255."""
    found = browser.evaluate(f"({COLOURS})({json.dumps(selector)})")
    text, fill = ([float(part) for part in value[value.index("(") + 1 : -1].split(",")[:3]] for value in found)
    return text, fill


def _luminance(colour: list[float]) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_learned_and_masked_tokens_differ_and_can_be_read(
    browser: browsers.Browser, inspected: tuple[Path, Inspection], scheme: str
) -> None:
    browser.open(inspected[0], scheme=scheme)
    learned, masked = _colours(browser, f"{TOKEN}.l"), _colours(browser, f"{TOKEN}.m")
    assert learned[0] != masked[0]
    assert learned[1] != masked[1]
    assert _contrast(*learned) >= READABLE
    assert _contrast(*masked) >= READABLE
    assert _contrast(*_colours(browser, "td.preview")) >= READABLE
    assert _contrast(*_colours(browser, ".begins")) >= READABLE
    for level in ("ok", "warning"):
        assert _contrast(*_colours(browser, f".mark.{level}")) >= READABLE
    # Colour is not all: learned tokens are underlined as well.
    border = "getComputedStyle(document.querySelector('.t.{}')).borderBottomWidth"
    assert browser.evaluate(border.format("l")) == "2px"
    assert browser.evaluate(border.format("m")) == "0px"
    page_fill = _luminance(_colours(browser, "main")[1])
    assert page_fill > 0.8 if scheme == "light" else page_fill < 0.05


def test_tokens_are_those_of_the_inspection(browser: browsers.Browser, inspected: tuple[Path, Inspection]) -> None:
    page, found = inspected
    browser.open(page)
    shown: list[list[Any]] = browser.evaluate(
        f"[...document.querySelectorAll('#examples article {TOKEN}')].map(t => [+t.title, t.classList.contains('l')])"
    )
    assert shown == [[token.id, token.learned] for view in found.examples for token in view.tokens]
    text = browser.evaluate("document.querySelector('#examples article .tokens').innerText")
    assert "<script>document.title = 'stolen'</script>" in text.replace("\u00a0", " ")
    assert "stolen" not in browser.evaluate("document.title")


def test_the_histogram_has_a_bar_for_each_bin(browser: browsers.Browser, inspected: tuple[Path, Inspection]) -> None:
    page, found = inspected
    browser.open(page)
    drawn = browser.evaluate(
        "[...document.querySelectorAll('svg.histogram')].map(s => [...s.querySelectorAll('rect.bar')]"
        ".map(b => [+b.dataset.count, b.getBoundingClientRect().height]))"
    )
    assert [[count for count, _ in bars] for bars in drawn] == [list(split.histogram.counts) for split in found.splits]
    for bars, split in zip(drawn, found.splits, strict=True):
        assert sum(count for count, _ in bars) == split.rows
        tallest = max(height for _, height in bars)
        most = max(split.histogram.counts)
        # Heights are in proportion to the counts, as far as pixels allow.
        assert all(abs(height - count / most * tallest) < 2 for count, height in bars)
        assert tallest > 90


def test_numbers_are_those_of_the_inspection(browser: browsers.Browser, inspected: tuple[Path, Inspection]) -> None:
    page, found = inspected
    browser.open(page)
    cells = browser.evaluate(
        "[...document.querySelectorAll('#splits [data-key]')].map(c => [c.dataset.key, c.innerText])"
    )
    train, held_out = found.splits
    for key in ("rows", "tokens", "supervised"):
        wanted = [f"{getattr(split, key):,}" for split in (train, held_out)]
        assert [text for name, text in cells if name == key] == wanted
    copies = browser.evaluate(
        "[...document.querySelectorAll('[data-duplicates]')]"
        ".map(r => [r.dataset.duplicates, +r.querySelector('[data-key=copies]').innerText])"
    )
    assert copies == [["-".join(each.splits), each.rows] for each in found.duplicates]
    assert sum(rows for _, rows in copies) == 3
    assert train.packing is not None
    assert (
        browser.evaluate("document.querySelector('#packing [data-key=fill]').innerText") == f"{train.packing.fill:.1%}"
    )
    assert (
        browser.evaluate("document.querySelector('#packing [data-key=packs]').innerText") == f"{train.packing.packs:,}"
    )
    serving = "document.querySelector('#serving [data-key={}]').innerText"
    assert browser.evaluate(serving.format("matching")) == browser.evaluate(serving.format("turns")) == "111"


@pytest.mark.parametrize("width", [420, 1280])
def test_the_page_fits_and_asks_for_nothing(
    browser: browsers.Browser, inspected: tuple[Path, Inspection], width: int
) -> None:
    browser.open(inspected[0], width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.requests == [inspected[0].resolve().as_uri()]


def test_a_page_that_is_too_wide_would_be_seen(browser: browsers.Browser, tmp_path: Path) -> None:
    """The negative control of the test above."""
    page = tmp_path / "wide.html"
    page.write_text("<!doctype html><img src='missing.png'><div style='width: 2000px'>wide</div>", encoding="utf-8")
    browser.open(page, width=420)
    assert browser.evaluate("document.documentElement.scrollWidth") > 420
    assert len(browser.requests) == 2
