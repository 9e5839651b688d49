"""The page of `finray inspect` says what the inspection says, needs nothing else, and no data can break out of it."""

from __future__ import annotations

import io
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from finray.cli.inspect import print_inspection, row_text
from finray.errors import DataError
from finray.inspection.measure import Histogram
from finray.inspection.page import page, percent, plot, segments, shown, token_parts, write_page
from finray.inspection.token_views import TokenView
from tests.support.rows import ListRows, chat_row, inspect_rows, serving_of

EVIL = "<script>alert('x')</script> <img src=x onerror=alert(1)> \" onmouseover=\"alert(2) {{ 7 * 7 }} &amp;"
VOID = {"meta", "col", "img", "br", "line", "rect", "link", "input"}


class Page(HTMLParser):
    """A page as elements with attributes and the text inside each token, table cell and title."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(html)
        assert not self.open, [tag for tag, _, _ in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in VOID and tag != "rect":
            self.elements.append((tag, dict(attributes), ""))
        else:
            self.open.append((tag, dict(attributes), []))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes), ""))

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        name, attributes, text = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"
        self.elements.append((name, attributes, "".join(text)))

    def of(self, name: str, css: str | None = None) -> list[tuple[dict[str, str | None], str]]:
        return [
            (attributes, text)
            for tag, attributes, text in self.elements
            if tag == name and (css is None or css in (attributes.get("class") or "").split())
        ]


@pytest.fixture
def inspection(tokenizer: Any) -> Any:
    questions = ["one two", EVIL, "where is\nthe house", "how\tmany"]
    rows = ListRows([chat_row(tokenizer, question, f"yes {EVIL}") for question in [*questions, *questions]], file=EVIL)
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    serving = serving_of(
        tokenizer, rows, lambda number: prompts[number % 4] + (f"<think>{EVIL}" if number == 1 else "")
    )
    counters = {"train": {"source_rows": 12, "rows": 8, "truncated": 2, "dropped_too_long": 3, "answers_lost": 1}}
    return inspect_rows(
        tokenizer, {"train": rows, "eval": ListRows([rows.row(0)])}, max_length=400, serving=serving, counters=counters
    )


def test_the_page_needs_nothing_else_and_runs_nothing(inspection: Any) -> None:
    html = page(inspection)
    parsed = Page(html)
    assert (
        Counter(tag for tag, _, _ in parsed.elements).keys().isdisjoint({"script", "img", "link", "iframe", "object"})
    )
    for tag, attributes, _ in parsed.elements:
        assert not {name for name in attributes if name.startswith("on")}, tag
        assert attributes.keys().isdisjoint({"src", "href", "action", "xlink:href"}), tag
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_data_is_text_and_never_markup(inspection: Any) -> None:
    parsed = Page(page(inspection))
    text = "".join(text for _, text in parsed.of("div", "tokens")).replace("↵", "").replace("⇥", "")
    assert EVIL in text
    assert "49" not in [text for _, text in parsed.of("span", "t")]
    assert "prefers-color-scheme: dark" in page(inspection)


def test_tokens_are_spans_with_their_ids(inspection: Any) -> None:
    parsed = Page(page(inspection))
    (section,) = [text for attributes, text in parsed.of("section") if attributes.get("id") == "examples"]
    assert "8 rows" not in section
    views = [token for view in inspection.examples for token in view.tokens]
    learned = [attributes["title"] for attributes, _ in parsed.of("span", "l") if "title" in attributes]
    assert Counter(learned) == Counter(str(token.id) for token in views if token.learned)
    # Prompts that differ from the served ones are shown token by token as well.
    masked = Counter(attributes["title"] for attributes, _ in parsed.of("span", "m") if "title" in attributes)
    assert not Counter(str(token.id) for token in views if not token.learned) - masked


def test_numbers_are_those_of_the_inspection(inspection: Any) -> None:
    parsed = Page(page(inspection))
    cells: dict[str, list[str]] = {}
    for attributes, text in [*parsed.of("td"), *parsed.of("b")]:
        cells.setdefault(attributes.get("data-key") or "", []).append(text)
    train, held_out = inspection.splits
    assert cells["rows"] == [f"{train.rows:,}", f"{held_out.rows:,}"]
    assert cells["tokens"] == [f"{train.tokens:,}", f"{held_out.tokens:,}"]
    assert cells["supervised"] == [f"{train.supervised:,}", f"{held_out.supervised:,}"]
    assert (cells["truncated"], cells["dropped"], cells["answers_lost"]) == (["2", "–"], ["4", "–"], ["1", "–"])
    assert [cells["matching"], cells["turns"]] == [["7"], ["8"]]
    assert cells["copies"] == [str(found.rows) for found in inspection.duplicates]
    bars = [int(attributes["data-count"] or 0) for attributes, _ in parsed.of("rect", "bar")]
    assert bars == [*train.histogram.counts, *held_out.histogram.counts]
    assert [text for _, text in parsed.of("title")].count("max_length") == 0


def test_bars_and_ticks_stay_inside_the_plot() -> None:
    for counts in ((1,), (0, 3, 0, 1_234_567), tuple(range(1, 33)), (7,) * 20):
        drawn = plot(Histogram(16, counts), limit=16 * len(counts))
        assert [bar.count for bar in drawn.bars] == list(counts)
        assert drawn.limit == 100
        for bar, count in zip(drawn.bars, counts, strict=True):
            assert 0 <= bar.x < bar.x + bar.width <= 100
            assert bar.y >= 0
            assert (bar.height > 0) == (count > 0)
        assert all(0 <= tick.at <= 100 for tick in drawn.x_ticks)
        assert max(tick.value for tick in drawn.y_ticks) >= max(counts)
        assert len(drawn.x_ticks) >= 2
    assert plot(Histogram(1, (5, 5)), limit=1024).limit is None


def test_shares_are_never_rounded_to_nothing_or_all() -> None:
    assert [percent(share) for share in (0, 1, 0.5, 0.0001, 0.99999)] == ["0%", "100%", "50.0%", "< 0.1%", "> 99.9%"]


def test_token_shares_add_up(inspection: Any) -> None:
    parts = token_parts(inspection.splits[0])
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert {part.key: part.count for part in parts}["learned"] == inspection.splits[0].supervised


def test_white_space_and_invisible_characters_are_set_apart() -> None:
    found = [(part.kind, part.text) for part in segments("a  b\n\tc\x1b[31m\u200bd")]
    assert found == [
        ("text", "a"),
        ("space", " "),
        ("space", " "),
        ("text", "b"),
        ("line", "\n"),
        ("tab", "\t"),
        ("text", "c"),
        ("control", "U+001B"),
        ("text", "[31m"),
        ("control", "U+200B"),
        ("text", "d"),
    ]


def test_long_rows_are_shown_by_their_ends() -> None:
    tokens = [TokenView(number, "x", False, False) for number in range(5000)]
    first, left_out, last = shown(tokens)
    assert len(first) + left_out + len(last) == 5000
    assert (first[0].id, last[-1].id) == (0, 4999)


def test_a_page_that_cannot_be_written_is_an_error(inspection: Any, tmp_path: Any) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write_page(inspection, tmp_path / "no" / "page.html")


# --- terminal -------------------------------------------------------------------------------------------------------


def _printed(inspection: Any, **options: Any) -> str:
    stream = io.StringIO()
    print_inspection(Console(file=stream, width=160, **options), inspection)
    return stream.getvalue()


def test_without_colours_learned_text_is_between_brackets(inspection: Any) -> None:
    text = _printed(inspection)
    assert "\x1b" not in text
    assert "⟦yes <script>alert('x')</script>" in text
    assert text.count("⟦") == text.count("⟧") == len(inspection.examples)
    assert "{only served: <think>" in text
    for number in (inspection.splits[0].tokens, inspection.splits[0].supervised):
        assert f"{number:,}" in text


def test_with_colours_learned_text_has_another_style(inspection: Any) -> None:
    text = _printed(inspection, force_terminal=True, color_system="standard", no_color=False)
    assert "⟦" not in text
    assert re.search(r"\x1b\[1;32m[^\x1b]*yes", text)


def test_data_cannot_steer_the_terminal() -> None:
    tokens = [TokenView(1, "\x1b[2Jgone[bold]", True, False), TokenView(2, "\r\x07", False, False)]
    text = row_text(tokens, brackets=("⟦", "⟧")).plain
    assert text == "⟦<U+001B>[2Jgone[bold]⟧<U+000D><U+0007>"
