"""What is said of a prepared dataset: text written by hand for counts that are all different."""

from __future__ import annotations

from typing import Any

import pytest

from finray.data.dataset.manifest import Manifest, SplitStats, StreamEntry
from finray.data.dataset.report import COUNTERS, report_lines


def said(**counts: Any) -> list[str]:
    streams = tuple(StreamEntry(name, f"text ({name})", 10, 10, ()) for name in ("train-0", "train-1"))
    given = {"source_rows": 12_000, "rows": 9_876, "tokens": 40_000, "supervised": 10_000, "labels": (), **counts}
    split = SplitStats(**given, longest=1_234, kind="text", streams=streams)
    return report_lines(Manifest("f", "c", {}, {"train": split}))


USUAL = [
    "train-0: read as text (train-0)",
    "train-1: read as text (train-1)",
    "train: 9,876 rows, 40,000 tokens, 25% supervised, longest 1,234",
]


def test_rows_that_lost_nothing_are_three_lines_and_no_warning() -> None:
    assert said() == USUAL


def test_a_split_without_tokens_has_a_share_of_none() -> None:
    assert "0 tokens, 0% supervised" in said(tokens=0, supervised=0)[2]
    assert "1% of all tokens" not in said(tokens=0, supervised=0, split_conversations=1)[3]


def test_what_the_converter_left_out_and_what_was_split_is_said() -> None:
    left_out, split = said(left_out=2_100, split_conversations=1_500, split_rows=4_400, split_tokens=12_000)[3:]
    assert left_out == "train: the converter left out 2,100 of 12,000 rows"
    assert split.startswith("train: 1,500 conversations became 4,400 rows with 30% of all tokens: ")


@pytest.mark.parametrize("counter", COUNTERS)
def test_rows_that_lost_something_are_a_warning(counter: str) -> None:
    assert said(**{counter: 1_111}) == [*USUAL, f"warning: train: 1,111 of 12,000 rows {COUNTERS[counter]}"]


def test_several_rows_that_a_converter_made_of_one_are_not_more_than_all() -> None:
    assert said(empty_answers=20_000)[-1].startswith("warning: train: 20,000 of 20,000 rows have an empty answer")


def test_rows_that_were_cut_off_or_lost_their_answer_are_named() -> None:
    lost = said(answers_lost=1_111, answers_lost_at=("a.jsonl:4", "b.jsonl:1"))[-1]
    assert lost.endswith(f"rows {COUNTERS['answers_lost']}, such as a.jsonl:4, b.jsonl:1")
    cut = said(truncated=1_111, truncated_at=("a.jsonl:2",), answers_lost_at=("a.jsonl:4",))[-1]
    assert cut.endswith(f"rows {COUNTERS['truncated']}, such as a.jsonl:2")


def test_the_balance_of_labels_names_the_largest_ten_classes() -> None:
    def of(problem: Any, *rows: int) -> str:
        names = tuple(f"class {number}" for number in range(len(rows)))
        return said(problem=problem, labels=names, label_rows=rows)[3]

    assert of("regression") == "train: regression: each label is a number"
    assert of("single_label", 9_876) == "train: single_label, 1 class: class 0 9,876 (100.0%)"
    assert of("multi_label", 988, 4_938) == "train: multi_label, 2 classes: class 1 4,938 (50.0%), class 0 988 (10.0%)"
    many = of("single_label", *range(1, 13))
    assert many.startswith("train: single_label, 12 classes: class 11 12 (0.1%), class 10 11 (0.1%), ")
    assert many.endswith(", class 2 3 (0.0%) and 2 more")
    assert said(problem="single_label", labels=("a",), label_rows=(1,))[2].endswith("tokens, labelled, longest 1,234")
    assert "a 0 (0.0%)" in said(problem="single_label", labels=("a",), label_rows=(0,), rows=0)[3]


def test_files_without_rows_are_a_warning() -> None:
    assert said(empty_files=("a.jsonl",))[3] == "warning: train: 1 file without rows: a.jsonl"
    assert said(empty_files=("a.jsonl", "b.jsonl"))[3] == "warning: train: 2 files without rows: a.jsonl, b.jsonl"
