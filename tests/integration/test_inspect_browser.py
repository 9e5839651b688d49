"""The page that `finray inspect --html` writes, opened in headless Chromium; and curves as a report shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from finray.inspection.inspect import inspect
from finray.inspection.result import Inspection
from finray.reporting.page import render
from finray.reporting.plots import Series, curves
from tests.support import tiny
from tests.support.browser import contrast, luminance, opened, require_sound
from tests.support.runs import config_of, finray, write_config

pytestmark = pytest.mark.nightly

# What people with normal and with reduced sight need to read text (WCAG 2.2, level AA); 3 for parts of a plot.
READABLE = 4.5
VISIBLE = 3.0
TOKEN = ".tokens .t[title]"


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[Path, Inspection]:
    """The page of a small dataset, written by the command, and what it was made from."""
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
    code, out, err = finray("inspect", config, "--html", page, "--row", "rows.jsonl:8", "--row", 0)
    assert code == 0, err
    assert f"wrote {page}" in out
    return page, inspect(config_of(plain), chosen=["rows.jsonl:8", "0"])


@pytest.fixture(scope="module")
def inspected_classes(tmp_path_factory: pytest.TempPathFactory, classifier_run: Callable[..., dict[str, Any]]) -> Path:
    """The page of a dataset with labels."""
    folder = tmp_path_factory.mktemp("classes")
    config = write_config(classifier_run({"data.eval_ratio": 0.2}), folder / "config.yaml")
    code, _, err = finray("inspect", config, "--html", folder / "page.html")
    assert code == 0, err
    return folder / "page.html"


COLOURS = """(selector) => {
  const text = document.querySelector(selector);
  const fill = (one) => getComputedStyle(one).backgroundColor;
  let behind = text;
  while (fill(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
  return [getComputedStyle(text).color, fill(behind)];
}"""


def _colours(page: Page, selector: str) -> tuple[list[float], list[float]]:
    """Red, green and blue of text and of what is behind it, 0 to 255."""
    text, fill = (
        [float(part) for part in value[value.index("(") + 1 : -1].split(",")[:3]]
        for value in page.evaluate(COLOURS, selector)
    )
    return text, fill


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_learned_and_masked_tokens_differ_and_can_be_read(
    browser: Browser, inspected: tuple[Path, Inspection], scheme: str
) -> None:
    with opened(browser, inspected[0], scheme=scheme) as found:
        page = found.page
        learned, masked = _colours(page, f"{TOKEN}.l"), _colours(page, f"{TOKEN}.m")
        assert learned[0] != masked[0]
        assert learned[1] != masked[1]
        assert contrast(*learned) >= READABLE
        assert contrast(*masked) >= READABLE
        assert contrast(*_colours(page, "td.preview")) >= READABLE
        assert contrast(*_colours(page, ".begins")) >= READABLE
        for level in ("ok", "warning"):
            assert contrast(*_colours(page, f".mark.{level}")) >= READABLE
        for part in (".u-legend .u-label", ".u-legend .u-value", ".buttons button"):
            assert contrast(*_colours(page, f".plot {part}")) >= READABLE
        # Colour is not all: learned tokens are underlined as well.
        border = "getComputedStyle(document.querySelector('.t.{}')).borderBottomWidth"
        assert page.evaluate(border.format("l")) == "2px"
        assert page.evaluate(border.format("m")) == "0px"
        page_fill = luminance(_colours(page, "main")[1])
        assert page_fill > 0.8 if scheme == "light" else page_fill < 0.05


def test_tokens_are_those_of_the_inspection(browser: Browser, inspected: tuple[Path, Inspection]) -> None:
    path, found = inspected
    with opened(browser, path) as shown:
        tokens: list[list[Any]] = shown.page.evaluate(
            f"[...document.querySelectorAll('#examples article {TOKEN}')]"
            ".map(t => [+t.title, t.classList.contains('l')])"
        )
        assert tokens == [[token.id, token.learned] for view in found.examples for token in view.tokens]
        text = shown.page.evaluate("document.querySelector('#examples article .tokens').innerText")
        assert "<script>document.title = 'stolen'</script>" in text.replace("\u00a0", " ")
        assert "stolen" not in shown.page.title()


# Of each bar: its count, and how high its pixels reach at its middle, in CSS pixels.
DRAWN = """() => [...document.querySelectorAll('figure.plot')].map(({plot}) => {
  const {ctx, bbox, data: [xs, counts]} = plot;
  const fill = getComputedStyle(document.documentElement).getPropertyValue('--plot-1');
  const wanted = [1, 3, 5].map((at) => parseInt(fill.trim().slice(at, at + 2), 16));
  return [...counts].slice(0, -1).map((count, at) => {
    const x = Math.round(plot.valToPos((xs[at] + xs[at + 1]) / 2, 'x', true));
    const column = ctx.getImageData(x, bbox.top, 1, bbox.height).data;
    let height = 0;
    for (let y = 0; y < bbox.height; y++) {
      if (wanted.every((part, channel) => Math.abs(column[4 * y + channel] - part) < 12)) height++;
    }
    return [count, height / devicePixelRatio];
  });
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_histogram_has_a_bar_for_each_bin(
    browser: Browser, inspected: tuple[Path, Inspection], scheme: str
) -> None:
    path, found = inspected
    with opened(browser, path, scheme=scheme) as shown:
        drawn = shown.page.evaluate(DRAWN)
    assert [[count for count, _ in bars] for bars in drawn] == [list(split.histogram.counts) for split in found.splits]
    for bars, split in zip(drawn, found.splits, strict=True):
        assert sum(count for count, _ in bars) == split.rows
        tallest = max(height for _, height in bars)
        most = max(split.histogram.counts)
        # Heights are in proportion to the counts, as far as pixels allow.
        assert all(abs(height - count / most * tallest) <= 2.5 for count, height in bars), bars
        assert all((height > 0) == (count > 0) for count, height in bars)
        assert tallest > 90


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (768, "light"), (1440, "light")])
@pytest.mark.parametrize("has_labels", [False, True])
def test_the_page_fits_asks_for_nothing_and_has_no_serious_fault_of_accessibility(
    browser: Browser,
    inspected: tuple[Path, Inspection],
    inspected_classes: Path,
    width: int,
    scheme: str,
    has_labels: bool,
) -> None:
    path = inspected_classes if has_labels else inspected[0]
    with opened(browser, path, width=width, scheme=scheme) as found:
        said = found.page.inner_text("body")
        # Rows have labels, or answers.
        assert [name in said for name in ("animal", "neither", "plant")] == [has_labels] * 3
        assert not has_labels or "Answers lost" not in said
        require_sound(found, path, width)


def test_a_page_that_is_too_wide_or_loads_something_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    """The negative control of the test above."""
    path = tmp_path / "wide.html"
    path.write_text("<!doctype html><img src='missing.png'><div style='width: 2000px'>wide</div>", encoding="utf-8")
    with opened(browser, path, width=390) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") > 390
        assert len(found.requests) == 2
        assert found.console


def test_a_script_that_gets_into_the_page_is_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    template = '{% extends "shell.html.j2" %}{% block body %}{{ body|safe }}{% endblock %}'
    path.write_text(render(template, body="<script>document.title = 'stolen'</script><img src=x>"), encoding="utf-8")
    with opened(browser, path) as found:
        assert found.page.title() == ""
        assert len([line for line in found.console if "Content Security Policy" in line]) == 2


# --- plots ----------------------------------------------------------------------------------------------------------

STEPS = list(range(1, 201))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plots of two runs that share their axis; one run has every fifth step."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    loss = [
        Series("first", STEPS, [4 / step for step in STEPS]),
        Series("second", STEPS[::5], [3 / step for step in STEPS[::5]]),
    ]
    rate = [Series("first", STEPS, [2e-4 * (1 - step / 400) for step in STEPS])]
    plots = [
        curves(loss, title="Loss", x_label="step", y_label="loss", group="run"),
        curves(rate, title="Learning rate", x_label="step", y_label="learning rate", group="run"),
    ]
    template = (
        '{% extends "shell.html.j2" %}{% block title %}report{% endblock %}{% block body %}<section>'
        "{% for plot in plots %}{{ figure(plot) }}{% endfor %}</section>{% endblock %}"
    )
    path.write_text(render(template, plots=plots), encoding="utf-8")
    return path


VALUES = (
    "[...document.querySelectorAll('.u-legend')].map(l => [...l.querySelectorAll('.u-value')].map(v => v.innerText))"
)
SCALES = "[...document.querySelectorAll('figure.plot')].map(f => [f.plot.scales.x.min, f.plot.scales.x.max])"


def test_plots_are_operated_with_the_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report) as found:
        page = found.page
        page.keyboard.press("Tab")
        order = []
        for _ in range(4):
            order.append(page.evaluate("document.activeElement.ariaLabel"))
            page.keyboard.press("Tab")
        assert order[0:3] == ["Zoom out", "Zoom in", "Show all"]
        assert order[3].startswith("Plot of loss by step")
        page.locator(".area").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate(VALUES)[0][0] == "3"
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(VALUES)[0][:2] == ["2", "2"]
        page.keyboard.press("+")
        assert page.evaluate("document.querySelector('.u-legend').ariaLive") == "polite"
        zoomed = page.evaluate(SCALES)
        assert zoomed[0] == zoomed[1]
        assert zoomed[0][1] - zoomed[0][0] <= 100
        page.keyboard.press("0")
        assert page.evaluate(SCALES) == [[1, 200], [1, 200]]


def _until(page: Page, condition: str) -> None:
    """Wait for a condition; Playwright's own way evaluates it in the page, which the page's policy forbids."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not within 5 s: {condition}")


def test_plots_follow_the_colour_scheme_and_the_width(browser: Browser, report: Path) -> None:
    with opened(browser, report) as found:
        page = found.page
        colours = "['--plot-1', '--plot-2'].map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
        light = page.evaluate(colours)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(colours) != light
        marker = "getComputedStyle(document.querySelectorAll('.u-marker')[1]).borderColor"
        dark = page.evaluate(colours)[0].strip()
        wanted = f"rgb({', '.join(str(int(dark[at : at + 2], 16)) for at in (1, 3, 5))})"
        _until(page, f"{marker} === '{wanted}'")
        background = [int("181c20"[at : at + 2], 16) for at in (0, 2, 4)]
        for colour in page.evaluate(colours):
            assert contrast([int(colour.strip()[at : at + 2], 16) for at in (1, 3, 5)], background) >= VISIBLE
        page.set_viewport_size({"width": 390, "height": 800})
        _until(page, "document.querySelector('canvas').getBoundingClientRect().width < 390")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert found.console == []
