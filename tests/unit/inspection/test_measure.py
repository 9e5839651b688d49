"""What `finray inspect` measures, against naive recomputation."""

from __future__ import annotations

import copy
import random
from collections import Counter
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from finray.data.sampling.packing import plan_packs
from finray.errors import DataError
from finray.inspection.checks import Check
from finray.inspection.measure import histogram, last_question, packing
from finray.inspection.result import findings, verdict
from finray.inspection.show import length_bars
from finray.inspection.tokens import special_tokens, token_texts
from tests.support.examples import examples
from tests.support.rows import ListRows, chat_row, completion_row, inspect_rows, parity_of
from tests.support.tiny import WORDS

EOS = "<|im_end|>"


def _random_rows(tokenizer: Any, count: int, *, seed: int) -> list[tuple[list[int], list[int]]]:
    random_words = random.Random(seed)
    return [
        chat_row(
            tokenizer,
            " ".join(random_words.choices(WORDS, k=random_words.randint(1, 12))),
            " ".join(random_words.choices(WORDS, k=random_words.randint(1, 8))),
        )
        for _ in range(count)
    ]


def _check(checks: tuple[Check, ...], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_counts_are_those_of_the_rows(tokenizer: Any) -> None:
    rows = _random_rows(tokenizer, 200, seed=1)
    found = inspect_rows(tokenizer, {"train": ListRows(rows), "eval": ListRows(rows[:7], file="held.jsonl")})
    train, held_out = found.splits
    lengths = sorted(len(ids) for ids, _ in rows)
    assert (train.rows, held_out.rows) == (200, 7)
    assert train.tokens == sum(lengths)
    assert train.supervised == sum(sum(mask) for _, mask in rows)
    assert train.quantiles == (lengths[0], lengths[99], lengths[189], lengths[-1])
    assert [row.tokens for row in train.longest] == lengths[::-1][:5]
    assert [row.tokens for row in train.shortest] == lengths[:5]
    assert train.longest[0].where == f"rows.jsonl:{train.longest[0].index + 1}"
    assert held_out.packing is None
    assert train.packing is not None
    assert train.packing.tokens_per_pack == pytest.approx(train.packing.fill * 64)
    assert train.packing.packs >= sum(lengths) / 64


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300))
def test_histogram_counts_every_row_once(lengths: list[int]) -> None:
    found = histogram(np.array(lengths))
    naive = Counter((length - 1) // found.width for length in lengths)
    assert dict(enumerate(found.counts)) == {number: naive[number] for number in range(len(found.counts))}
    assert sum(found.counts) == len(lengths)
    assert len(found.counts) <= 32
    assert found.counts[-1] > 0


def test_packing_says_what_padding_would_waste() -> None:
    lengths = np.array([10, 10, 10, 2])
    found = packing(lengths, plan_packs(lengths, 20))
    assert (found.packs, found.fill, found.rows_per_pack, found.padded_fill) == (2, 0.8, 2.0, 0.8)


def test_duplicates_are_found_inside_and_across_splits(tokenizer: Any) -> None:
    rows = _random_rows(tokenizer, 60, seed=2)
    train = ListRows([*rows[:40], rows[3], rows[3], rows[9]])
    held_out = ListRows([*rows[40:55], rows[5], rows[5]], file="eval.jsonl")
    test = ListRows(rows[55:], file="test.jsonl")
    found = {
        duplicates.splits: duplicates
        for duplicates in inspect_rows(tokenizer, {"train": train, "eval": held_out, "test": test}).duplicates
    }
    assert (found["train",].rows, found["train",].groups) == (3, 2)
    assert found["train",].examples[0].count == 3
    assert found["train",].examples[0].where == ("rows.jsonl:4", "rows.jsonl:41", "rows.jsonl:42")
    assert (found["eval",].rows, found["eval",].groups) == (1, 1)
    assert (found["train", "eval"].rows, found["train", "eval"].of) == (2, 17)
    assert found["train", "eval"].examples[0].where == ("rows.jsonl:6", "eval.jsonl:16", "eval.jsonl:17")
    assert found["test",].rows == found["train", "test"].rows == found["eval", "test"].rows == 0


def test_rows_that_differ_in_one_token_are_no_duplicates(tokenizer: Any) -> None:
    """The negative control: what was found above is equality, and not likeness."""
    rows = _random_rows(tokenizer, 30, seed=3)
    changed = copy.deepcopy(rows)
    for ids, _ in changed:
        ids[-2] += 1
    found = inspect_rows(tokenizer, {"train": ListRows(rows), "eval": ListRows(changed)}).duplicates
    assert [duplicates.rows for duplicates in found] == [0, 0, 0]


def test_a_row_that_a_mix_repeats_is_no_duplicate_of_itself(tokenizer: Any) -> None:
    first, second = _random_rows(tokenizer, 2, seed=12)
    rows = ListRows([first, first, first, second, first], sources=[7, 7, 7, 8, 9])
    found = inspect_rows(tokenizer, {"train": rows}).duplicates[0]
    assert (found.rows, found.groups, found.of) == (1, 1, 3)
    # Nor is it counted, or listed, as one.
    (group,) = found.examples
    assert group.count == len(group.where) == len(set(group.where)) == 2


def test_good_rows_pass_every_check(tokenizer: Any) -> None:
    rows = ListRows(_random_rows(tokenizer, 50, seed=4))
    found = inspect_rows(tokenizer, {"train": rows})
    ends = _check(found.checks, "Learned text ends with an end token")
    assert (ends.level, ends.of, ends.finding.endswith(f"{EOS} (50)")) == ("ok", 50, True)
    assert {check.level for check in found.checks} == {"ok"}
    assert verdict(findings(found)) == ("ok", "No problems found")


def test_an_answer_that_fills_the_row_is_cut_off_and_not_open(tokenizer: Any) -> None:
    ids, mask = completion_row(tokenizer, "question", " one two three four five")
    found = inspect_rows(tokenizer, {"train": ListRows([(ids, mask)])}, max_length=len(ids)).checks
    assert _check(found, "Learned text ends with an end token").level == "ok"
    cut = _check(found, "Learned text that is cut off")
    assert (cut.level, cut.count) == ("warning", 1)
    text = inspect_rows(tokenizer, {"train": ListRows([(ids, mask)])}, max_length=len(ids), kind="text").checks
    assert _check(text, "Learned text that is cut off").level == "ok"


def test_every_answer_without_its_end_is_a_problem(tokenizer: Any) -> None:
    good, name = _random_rows(tokenizer, 9, seed=5), "Learned text ends with an end token"
    rows = ListRows([*good, completion_row(tokenizer, "question", " answer")])
    check = _check(inspect_rows(tokenizer, {"train": rows}).checks, name)
    assert (check.level, check.count, check.of, check.where) == ("problem", 1, 10, ("rows.jsonl:10",))
    # Each answer of a conversation is looked at.
    first, second = chat_row(tokenizer, "one", "two"), completion_row(tokenizer, "three", " four")
    joined = ListRows([(first[0] + second[0], first[1] + second[1])])
    check = _check(inspect_rows(tokenizer, {"train": joined}).checks, name)
    assert (check.count, check.of) == (1, 2)
    assert "generation_config.json" not in check.finding
    # What begins the next turn is named, if it is a special token at which no server stops.
    check = _check(
        inspect_rows(tokenizer, {"train": ListRows([(second[0] + first[0], second[1] + first[1])])}).checks, name
    )
    opener = tokenizer.decode(first[0][:1])
    assert f"The next turn begins with {opener} ({first[0][0]}): add its id to eos_token_id" in check.finding


def test_white_space_behind_the_end_is_no_open_end(tokenizer: Any) -> None:
    rows = [(ids, [1] * len(ids)) for ids, _ in _random_rows(tokenizer, 5, seed=6)]
    check = _check(
        inspect_rows(tokenizer, {"train": ListRows(rows)}, train_on="all").checks, "Learned text ends with an end token"
    )
    assert (check.level, check.of) == ("ok", 5)


def test_end_tokens_that_serving_does_not_stop_at_are_a_problem(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|endoftext|>"
    rows = ListRows(_random_rows(tokenizer, 4, seed=7))
    check = _check(inspect_rows(other, {"train": rows}).checks, "Serving stops at these tokens")
    assert (check.level, check.count) == ("problem", 4)
    end = tokenizer.convert_tokens_to_ids(EOS)
    assert _check(inspect_rows(other, {"train": rows}, stops=[end]).checks, check.name).level == "ok"


def _with_bos(tokenizer: Any) -> Any:
    """A tokenizer that puts a BOS in front of every text."""
    from tokenizers import processors

    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<s>"})
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", other.bos_token_id)]
    )
    return other


@pytest.mark.parametrize(
    ("times", "chat", "level"),
    [
        (1, False, "ok"),
        (1, True, "ok"),
        (0, False, "problem"),
        (0, True, "note"),
        (2, False, "problem"),
        (2, True, "problem"),
    ],
)
def test_bos_doubled_or_missing(tokenizer: Any, times: int, chat: bool, level: str) -> None:
    other = _with_bos(tokenizer)
    ids, mask = chat_row(other, "one", "two")
    rows = ListRows([([other.bos_token_id] * times + ids, [0] * times + mask)])
    assert (
        _check(inspect_rows(other, {"train": rows}, kind="chat" if chat else "completion").checks, "BOS").level == level
    )


def test_later_pieces_of_a_long_text_need_no_bos(tokenizer: Any) -> None:
    other = _with_bos(tokenizer)
    ids = other("one two three")["input_ids"]
    rows = ListRows([(ids, [1] * len(ids)), (ids[1:], [1] * (len(ids) - 1))], sources=[0, 0])
    assert _check(inspect_rows(other, {"train": rows}, kind="text", max_length=len(ids)).checks, "BOS").level == "ok"


def test_unknown_tokens_and_special_tokens_in_answers_are_counted(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"unk_token": "<unk>", "pad_token": EOS})
    rows = ListRows(
        [
            chat_row(other, "one <unk> two", "three"),
            chat_row(other, "one", "two <|im_start|> three"),
            *_random_rows(other, 3, seed=8),
        ]
    )
    checks = inspect_rows(other, {"train": rows}).checks
    unknown = _check(checks, "Unknown tokens")
    assert (unknown.level, unknown.count, unknown.where) == ("warning", 1, ("rows.jsonl:1",))
    inside = _check(checks, "Special tokens inside learned text")
    assert (inside.level, inside.count, inside.where) == ("warning", 1, ("rows.jsonl:2",))
    assert "<|im_start|> (1)" in inside.finding
    assert _check(checks, "Padding and EOS").level == "note"


def test_counters_of_the_preparation_become_findings(tokenizer: Any) -> None:
    rows = ListRows(_random_rows(tokenizer, 5, seed=9))
    counters = {"train": {"source_rows": 9, "truncated": 2, "answers_lost": 3, "bad_rows": 0, "system_ignored": 1}}
    checks = findings(inspect_rows(tokenizer, {"train": rows}, counters=counters))
    told = {check.name: (check.level, check.count, check.of) for check in checks}
    assert told["Answers lost (train)"] == ("problem", 3, 9)
    assert told["Rows cut off (train)"] == ("warning", 2, 9)
    assert told["System message ignored (train)"] == ("warning", 1, 9)
    assert not any("Bad rows" in name for name in told)
    assert checks[0].level == "problem"
    assert verdict(checks) == ("problem", "1 problem that will hurt training")


def test_chosen_rows_are_shown(tokenizer: Any) -> None:
    rows = ListRows(_random_rows(tokenizer, 20, seed=10), file="data/rows.jsonl")
    held_out = ListRows(_random_rows(tokenizer, 3, seed=11), file="data/held.jsonl")
    splits = {"train": rows, "eval": held_out}
    assert [view.index for view in inspect_rows(tokenizer, splits, examples=4).examples] == [0, 5, 10, 15]
    shown = inspect_rows(tokenizer, splits, chosen=["2", "rows.jsonl:12", "data/held.jsonl:3"]).examples
    assert [(view.split, view.index) for view in shown] == [("train", 2), ("train", 11), ("eval", 2)]
    ids, mask = rows.row(2)
    assert [token.id for token in shown[0].tokens] == ids.tolist()
    assert [token.learned for token in shown[0].tokens] == mask.astype(bool).tolist()
    assert shown[0].supervised == rows.supervised[2]
    for wrong in ("20", "²", "rows.jsonl:99", "ows.jsonl:1"):
        with pytest.raises(DataError, match="there is no row"):
            inspect_rows(tokenizer, splits, chosen=[wrong])


@settings(deadline=None, max_examples=examples(80))
@given(text=st.text(max_size=80))
def test_the_texts_of_tokens_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_previews_show_the_last_question(tokenizer: Any) -> None:
    ids = tokenizer("a🙂b", add_special_tokens=False)["input_ids"]
    assert token_texts(ids, tokenizer) == ["a", "", "", "", "🙂", "b"]
    names = special_tokens(tokenizer).names.values()
    prompt = f"<|im_start|>system\none two three{EOS}\n<|im_start|>user\nwhat is a tree{EOS}\n<|im_start|>assistant\n"
    assert last_question(prompt, names) == "user\nwhat is a tree"
    assert last_question("[SYS]be kind[/SYS]hi<r>model</r>\n\n", ["[SYS]", "[/SYS]", "<r>", "</r>"]) == "hi"
    assert last_question("a plain prompt", names) == "a plain prompt"


# --- serving --------------------------------------------------------------------------------------------------------


def _served_prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}{EOS}\n<|im_start|>assistant\n"


def test_the_pieces_of_a_difference_are_both_prompts(tokenizer: Any) -> None:
    rows = ListRows([chat_row(tokenizer, "the green house", "yes")])
    (difference,) = parity_of(tokenizer, rows, lambda _: _served_prompt("the blue house please")).differences
    assert difference.text("trained") == _served_prompt("the green house")
    assert difference.text("served") == _served_prompt("the blue house please")
    assert [piece.kind for piece in difference.stretches].count("same") >= 2


def test_a_refused_prompt_is_no_proof(tokenizer: Any) -> None:
    def refuse(number: int) -> str:
        raise DataError("the chat template refuses the conversation")

    found = parity_of(tokenizer, ListRows([chat_row(tokenizer, "one", "two")]), refuse)
    assert (found.turns, found.refused, found.holds) == (0, 1, False)


def test_a_bar_of_one_length_is_named_by_it() -> None:
    console = Console(file=StringIO(), width=80)
    console.print(length_bars(histogram(np.array([1, 2, 2])), bar="#"))
    assert " to " not in console.file.getvalue()
    console.print(length_bars(histogram(np.array([1, 500])), bar="#"))
    assert "1 to 32" in console.file.getvalue()
