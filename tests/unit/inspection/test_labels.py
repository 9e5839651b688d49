"""What an inspection says of labelled text: classes, contradictions, rows cut off; in terminal, JSON and page."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from finray.inspection.inspect import inspect
from finray.inspection.labels import ClassBalance
from finray.inspection.page import page
from finray.inspection.result import Inspection, findings
from tests.support.labelled import CLASSIFIES
from tests.support.labelled import classifying as classifying
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import put as put


def inspected(classifying: Preparing, put: Write, rows: list[dict[str, Any]], **sections: Any) -> Inspection:
    source = put("rows.jsonl", lines(rows))
    folder = source.parent / "out"
    config = classifying.config(source, model=CLASSIFIES, run={"output_dir": str(folder)}, **sections)
    return inspect(config)


def row(text: str, label: Any) -> dict[str, Any]:
    return {"text": text, "label": label}


def named(found: Inspection) -> dict[str, Any]:
    return {check.name: check for check in findings(found)}


def test_equal_texts_with_different_labels_are_named_with_both_rows(classifying: Preparing, put: Write) -> None:
    rows = [row("one cat", "a"), row("two dogs", "b"), row("one cat", "b"), row("two dogs", "b"), row("three", "a")]
    check = named(inspected(classifying, put, rows))["Equal texts, different labels"]
    assert (check.level, check.count, check.of) == ("warning", 2, 5)
    assert check.where == ("rows.jsonl:1 (a) = rows.jsonl:3 (b)",)
    # Equal texts with one label are duplicates, and no contradiction.
    rows[2]["label"] = "a"
    assert named(inspected(classifying, put, rows))["Equal texts, different labels"].level == "ok"


def test_rows_that_were_cut_off_are_counted_and_some_are_named(classifying: Preparing, put: Write) -> None:
    rows = [row("cat", 0), *(row(f"{word} " * 9, 1) for word in ("dog", "house", "tree", "river"))]
    check = named(inspected(classifying, put, rows, max_length=8))["Rows cut off (train)"]
    assert (check.count, check.of) == (4, 5)
    assert check.where == ("rows.jsonl:2", "rows.jsonl:3", "rows.jsonl:4")


@pytest.mark.parametrize(("many", "level"), [(10, "ok"), (11, "warning"), (101, "warning")])
def test_a_class_of_a_tenth_of_the_rows_of_another_is_a_warning(
    classifying: Preparing, put: Write, many: int, level: str
) -> None:
    rows = [row(f"cat {at}", int(at == 3)) for at in range(many)]
    check = named(inspected(classifying, put, rows))["Class balance"]
    assert (check.level, check.count, check.of) == (level, 1, many)


def test_terminal_json_and_page_show_the_classes_of_each_split(classifying: Preparing, put: Write) -> None:
    held_out = put("dev.jsonl", lines([row("a river", 1)]))
    rows = [row("the cat", 0), row("the dog", 1), row("a tree", 1), row("a house", 1)]
    names = {"labels": ["bad <b>", "good"]}
    found = inspected(classifying, put, rows, classification=names, eval_source=str(held_out))
    expected = (
        ClassBalance("train", "single_label", (("bad <b>", 1), ("good", 3))),
        ClassBalance("eval", "single_label", (("bad <b>", 0), ("good", 1))),
    )
    assert found.classes == expected
    assert found.plain()["classes"][0]["rows"] == (("bad <b>", 1), ("good", 3))
    console = Console(file=io.StringIO(), width=120)
    found.print(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 (75.0%)" in shown
    assert "label bad <b>" in shown
    assert "generat" not in shown
    html = page(found)
    assert "Classes of train" in html
    assert "bad &lt;b&gt;" in html
    assert "bad <b>" not in html
    assert "Training and serving" not in html


def test_numbers_are_shown_with_their_range(classifying: Preparing, put: Write) -> None:
    found = inspected(classifying, put, [row("cat", 0.5), row("dog", 4.5), row("tree", 1.0)])
    assert found.classes == (ClassBalance("train", "regression", (), 0.5, 2.0, 4.5),)
    assert found.examples[1].label == "4.5"
    assert ">0.5<" in page(found)


def test_the_second_text_of_a_pair_is_no_text_that_is_learned(classifying: Preparing, put: Write) -> None:
    """Where other rows have what is learned, these have token types."""
    rows = [{"premise": "the cat", "hypothesis": "the dog", "label": label} for label in (0, 1)]
    found = inspected(classifying, put, rows)
    assert [view.supervised for view in found.examples] == [0, 0]
    assert (found.splits[0].longest[0].prompt, found.splits[0].longest[0].learned) == ("the cat the dog", "0")
