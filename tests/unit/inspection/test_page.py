"""The page of `finray inspect` says what the inspection says, needs nothing else, and no data can break out of it."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from finray.inspection.page import page, token_parts
from finray.inspection.show import stretches_text
from finray.inspection.tokens import Stretch, TokenView, segments, shortened
from tests.support.html import Page
from tests.support.rows import ListRows, chat_row, inspect_rows, parity_of

EVIL = "<script>alert('x')</script> <img src=x onerror=alert(1)> \" onmouseover=\"alert(2) {{ 7 * 7 }} &amp;"


@pytest.fixture
def inspection(tokenizer: Any) -> Any:
    questions = ["one two", EVIL, "where is\nthe house", "how\tmany"]
    rows = ListRows([chat_row(tokenizer, question, f"yes {EVIL}") for question in [*questions, *questions]], file=EVIL)
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    parity = parity_of(tokenizer, rows, lambda number: prompts[number % 4] + (f"<think>{EVIL}" if number == 1 else ""))
    counters = {"train": {"source_rows": 12, "rows": 8, "truncated": 2, "dropped_too_long": 3, "answers_lost": 1}}
    return inspect_rows(
        tokenizer, {"train": rows, "eval": ListRows([rows.row(0)])}, max_length=400, parity=parity, counters=counters
    )


def test_the_page_needs_nothing_else_and_runs_only_its_own_script(inspection: Any) -> None:
    parsed = Page(page(inspection))
    assert Counter(tag for tag, _, _ in parsed.elements).keys().isdisjoint({"img", "link", "iframe", "object"})
    for tag, attributes, _ in parsed.elements:
        assert not {name for name in attributes if name.startswith("on")}, tag
        assert attributes.keys().isdisjoint({"src", "href", "action", "xlink:href"}), tag
    scripts = [text for attributes, text in parsed.of("script") if attributes.get("type") != "application/json"]
    assert len(scripts) == 1
    (policy,) = [attributes["content"] for attributes, _ in parsed.of("meta") if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert [part.strip().split()[0] for part in policy.split(";")] == [
        "default-src",
        "style-src",
        "script-src",
        "base-uri",
    ]
    styles = "".join(text for _, text in parsed.of("style"))
    for remote in ("http:", "https:", "url(", "@import"):
        assert remote not in styles


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
    assert train.packing is not None
    assert (cells["fill"], cells["packs"]) == ([f"{train.packing.fill:.1%}"], [f"{train.packing.packs:,}"])
    assert cells["copies"] == [str(found.rows) for found in inspection.duplicates]
    plots = [json.loads(text) for attributes, text in parsed.of("script") if "type" in attributes]
    assert [plot["series"][0]["y"][:-1] for plot in plots] == [
        list(split.histogram.counts) for split in (train, held_out)
    ]
    assert [plot["limit"] for plot in plots] == [None, None]


def test_token_shares_add_up(inspection: Any) -> None:
    parts = token_parts(inspection.splits[0])
    assert sum(share for _, _, _, share in parts) == pytest.approx(1)
    assert {key: count for key, _, count, _ in parts}["learned"] == inspection.splits[0].supervised


def test_white_space_and_invisible_characters_are_set_apart() -> None:
    assert segments("a  b\n\tc\x1b[31m\u200bd") == [
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
    first, gap, last = shortened(tokens, 800, 800)
    assert len(first.tokens) + gap.left_out + len(last.tokens) == 5000
    assert (first.tokens[0].id, last.tokens[-1].id) == (0, 4999)
    assert shortened(tokens[:1610], 800, 800) == [Stretch("same", tokens[:1610])]


# --- terminal -------------------------------------------------------------------------------------------------------


def _printed(inspection: Any, **options: Any) -> str:
    stream = io.StringIO()
    inspection.print(Console(file=stream, width=160, **options))
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
    text = stretches_text([Stretch("same", tokens)], brackets=("⟦", "⟧")).plain
    assert text == "⟦<U+001B>[2Jgone[bold]⟧<U+000D><U+0007>"


def test_the_address_of_the_data_is_shown_without_its_password(inspection: Any) -> None:
    from dataclasses import replace

    source = "http://bob:hunter-2@host/rows.jsonl?X-Amz-Signature=0123456789abcdef"
    config = inspection.config
    found = replace(
        inspection, config=config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    )
    stream = io.StringIO()
    found.print(Console(file=stream, width=200))
    for text in (page(found), stream.getvalue(), json.dumps(found.plain()["sources"])):
        assert "http://bob:***@host/rows.jsonl?***" in text
        assert "hunter-2" not in text
        assert "0123456789abcdef" not in text
