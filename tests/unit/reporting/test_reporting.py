"""Plots as the data that is drawn, and the shell of a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finray.errors import DataError
from finray.reporting.page import figure, percent, render, write
from finray.reporting.plots import Series, curves, histogram

EVIL = "</script><script>alert(1)</script><b>"


def test_a_histogram_has_an_edge_on_both_sides_of_each_bar() -> None:
    plot = histogram([1, 0, 3], width=16, title="t", x_label="tokens", y_label="rows", limit=(48, "limit"))
    (series,) = plot.series
    assert list(series.x) == [0, 16, 32, 48]
    assert list(series.y) == [1, 0, 3, None]
    assert plot.limit == (48, "limit")
    beyond = histogram([1, 0, 3], width=16, title="t", x_label="tokens", y_label="rows", limit=(49, "limit"))
    assert beyond.limit is None


def test_values_that_cannot_be_drawn_are_gaps() -> None:
    values = [1.0, float("nan"), float("inf"), -2.0, None]
    series = [Series("loss", [1, 2, 3, 4, 5], values)]
    plain = curves(series, title="t", x_label="step", y_label="loss").plain()
    assert plain["series"][0]["y"] == [1.0, None, None, -2.0, None]


def test_data_in_a_figure_cannot_leave_it() -> None:
    html = str(figure(curves([Series(EVIL, [1], [2])], title=EVIL, x_label=EVIL, y_label=EVIL), EVIL))
    assert EVIL not in html
    assert html.count("<script") == html.count("</script") == 1
    data = re.search(r"<script[^>]*>(.*)</script>", html)
    assert data is not None
    assert json.loads(data[1])["series"] == [{"label": EVIL, "x": [1], "y": [2]}]


def test_the_script_is_on_a_page_once() -> None:
    plot = histogram([1], width=1, title="t", x_label="x", y_label="y")
    template = (
        '{% extends "shell.html.j2" %}{% block title %}{{ name }}{% endblock %}'
        "{% block body %}{{ figure(plot) }}{{ figure(plot) }}{% endblock %}"
    )
    html = render(template, plot=plot, name=EVIL)
    assert EVIL not in html
    assert html.count("var uPlot=") == 1
    assert html.count('<figure class="plot"><figcaption>') == 2


def test_shares_are_never_rounded_to_nothing_or_all() -> None:
    assert [percent(share) for share in (0, 1, 0.5, 0.0001, 0.99999)] == ["0%", "100%", "50.0%", "< 0.1%", "> 99.9%"]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write("", tmp_path / "no" / "page.html")
