"""Rows that are in the training data: found and named; what belongs to a template, or is common, is not."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finray.evaluation import overlap as module
from finray.evaluation.overlap import Words, overlap

# Words of a run that counts, after Brown et al. 2020.
RUN = 13


class Split:
    """Rows in memory."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = [np.array(row, dtype=np.int32) for row in rows]
        self.lengths = np.array([len(row) for row in rows])
        self.digests = np.array([hash(tuple(row)) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> tuple[Any, Any]:
        return self.rows[number], np.ones(len(self.rows[number]), dtype=np.uint8)

    def where(self, number: int) -> str:
        return f"rows.jsonl:{number + 1}"


def each_token(rows: Sequence[Any]) -> tuple[Any, Any]:
    """Every token is a word."""
    ids = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.uint64)
    return ids, np.repeat(np.arange(len(rows)), [len(row) for row in rows])


TEMPLATE = list(range(1, 30))


def row(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(100, 50_000, length).tolist()


def rows(seeds: Sequence[int]) -> list[list[int]]:
    return [[*TEMPLATE, *row(seed)] for seed in seeds]


def found(test: list[list[int]], train: list[list[int]], numbers: Sequence[int] | None = None) -> Any:
    numbers = range(len(test)) if numbers is None else numbers
    return overlap(Split(test), numbers, Split(train), each_token)  # type: ignore[arg-type]


def naive(test: list[list[int]], train: list[list[int]]) -> set[int]:
    """Indices of rows with a run of 13 tokens that is in a training row, the template aside."""

    def runs(one: list[int]) -> set[tuple[int, ...]]:
        every = {tuple(one[at : at + RUN]) for at in range(len(one) - RUN + 1)}
        return {one for one in every if not set(one) <= set(TEMPLATE)}

    known = set().union(*map(runs, train))
    return {number for number, one in enumerate(test) if runs(one) & known}


def test_equal_rows_and_rows_that_share_a_run_are_named() -> None:
    test, train = rows(range(10)), rows(range(100, 140))
    train[7] = test[2]
    train[30] = [*TEMPLATE, *row(500, 9), *test[5][35:55], *row(501, 4)]
    seen = found(test, train)
    assert (seen.equal, seen.shared) == ((2,), (5,))
    assert seen.rows == {2, 5}
    first, second = sorted(seen.named)
    assert first[:2] == ("rows.jsonl:3", "rows.jsonl:8")
    assert first[2] == 1.0
    assert second[:2] == ("rows.jsonl:6", "rows.jsonl:31")
    assert 0 < second[2] < 0.5


def test_twelve_tokens_in_common_are_not_enough() -> None:
    test, train = rows(range(4)), rows(range(100, 104))
    for length, expected in ((RUN - 1, ()), (RUN, (1,))):
        train[3] = [*row(9, 5), *test[1][30 : 30 + length], *row(10, 5)]
        assert found(test, train).shared == expected


@pytest.mark.parametrize("block", [1, 50, 2**20])
def test_all_shared_runs_are_found_whatever_is_hashed_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOKENS", block)
    draw = np.random.default_rng(0)
    test, train = rows(range(30)), rows(range(100, 160))
    for number in (3, 11, 29):
        at = int(draw.integers(30, 50))
        other = train[int(draw.integers(0, 60))]
        other[34:34] = test[number][at : at + 14]
    assert found(test, train).rows == naive(test, train) == {3, 11, 29}


@pytest.mark.parametrize("words", [8, 12, 29])
def test_rows_that_begin_alike_behind_a_template_do_not_share_a_run(
    words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last words of a template and the first of a question are in few rows, and are no copy."""
    template, begins = TEMPLATE[:words], row(7, 10)
    train = [[*template, *(begins if seed % 10 == 0 else row(seed + 900, 10)), *row(seed)] for seed in range(100, 140)]
    copied = [*template, *row(8, 30), *train[3][words + 12 : words + 34]]
    test = [[*template, *begins, *row(1)], *([*template, *row(seed)] for seed in range(20, 26)), copied]
    seen = found(test, train)
    assert (seen.equal, seen.shared) == ((), (7,))
    # Its share is of the runs outside the template.
    assert seen.named[0][2] == round(10 / 40, 4)
    monkeypatch.setattr(module, "_TEMPLATE_RUN", 1000)
    assert found(test, train).shared == (0, 7)


@pytest.mark.parametrize(("holders", "counts"), [(1, True), (10, True), (11, False)])
def test_a_run_counts_in_up_to_ten_training_rows(holders: int, counts: bool) -> None:
    phrase = row(999, RUN)
    train = [
        [*row(seed, 9), *(phrase if seed < 200 + holders else []), *row(seed + 500, 9)] for seed in range(200, 240)
    ]
    test = [[*row(50, 8), *phrase, *row(51, 8)], row(1)]
    assert found(test, train).shared == ((0,) if counts else ())


@pytest.mark.parametrize(
    ("evaluated", "holders", "counts"),
    [(1, 1, True), (2, 1, True), (2, 2, False), (4, 2, False), (5, 2, True), (6, 2, True), (6, 3, False)],
)
def test_a_run_counts_in_less_than_half_of_the_evaluated_rows_and_in_a_single_one(
    evaluated: int, holders: int, counts: bool
) -> None:
    phrase = row(999, RUN)
    test = [[*row(seed, 9), *(phrase if seed < holders else [])] for seed in range(evaluated)]
    assert found(test, [[*row(70, 9), *phrase], row(71)]).shared == (tuple(range(holders)) if counts else ())


@pytest.mark.parametrize(
    ("total", "holders", "counts"), [(40, 19, True), (40, 20, False), (16, 10, True), (16, 11, False)]
)
def test_five_words_are_a_templates_in_half_of_the_training_rows_and_in_more_than_ten(
    total: int, holders: int, counts: bool
) -> None:
    five, follows = row(998, 5), row(999, 10)
    train = [[*row(seed, 9), *(five if seed < holders else []), *row(seed + 500, 20)] for seed in range(1, total)]
    train.append([*row(600, 9), *five, *follows])
    test = [[*row(50, 8), *five, *follows], row(51)]
    # Of the run only three words at most are not the template's neighbours.
    assert found(test, train).shared == ((0,) if counts else ())


def test_a_row_is_named_with_the_first_training_row_and_twenty_are_named() -> None:
    test = rows(range(25))
    train = [row(70), test[3], *test, test[3]]
    seen = found(test, train)
    assert (seen.equal, seen.shared) == (tuple(range(25)), ())
    assert len(seen.named) == 20
    assert seen.named[2:4] == (("rows.jsonl:3", "rows.jsonl:5", 1.0), ("rows.jsonl:4", "rows.jsonl:2", 1.0))
    assert seen.plain()["equal"] == 25
    copied = [*row(80, 30), *row(81, 30)]
    parts = found([copied, row(82)], [row(83), [*copied[:14], *row(84)], [*copied[20:50]], [*row(85), *copied[:15]]])
    # Runs begin at 48 words; 18 of them are in the third row, and 3 in the others.
    assert parts.named == (("rows.jsonl:1", "rows.jsonl:3", round(21 / 48, 4)),)
    assert parts.plain() == {
        **{"equal": 0, "shares_13_words": 1},
        "rows": [{"row": "rows.jsonl:1", "training_row": "rows.jsonl:3", "shared": 0.4375}],
    }


def test_only_the_rows_that_are_evaluated_are_looked_at() -> None:
    test = rows(range(8))
    train = [test[1], test[6], *rows(range(100, 110))]
    assert found(test, train, (0, 1, 4)).equal == (1,)
    assert found(test, train, (6,)).equal == (0,)
    assert found(test, train, (6,)).named[0][:2] == ("rows.jsonl:7", "rows.jsonl:2")


def by_hand(text: str) -> list[str]:
    return [
        word for word in (re.sub(f"[{re.escape(string.punctuation)}]", "", one) for one in text.lower().split()) if word
    ]


TEXTS = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 clips altogether.",
    "natalia SOLD 48/2 clips, in may!",
    "Jumping, jumped; it's the jumper's  two   spaces\tand a tab",
    "",
    "...",
]


def test_words_are_those_between_white_space_in_lower_case_without_punctuation(tokenizer: Any) -> None:
    hashes, owner = Words(tokenizer)([np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in TEXTS])
    expected = [(word, row) for row, text in enumerate(TEXTS) for word in by_hand(text)]
    assert owner.tolist() == [row for _, row in expected]
    of_word: dict[str, int] = {}
    for (word, _), value in zip(expected, hashes.tolist(), strict=True):
        assert of_word.setdefault(word, value) == value, word
    assert len(set(of_word.values())) == len(of_word)


def test_words_of_wordpiece_are_joined_from_their_pieces() -> None:
    """Its punctuation ends a word, as it does for the tokenizer."""
    pieces = ["[UNK]", "the", "un", "##train", "##able", "qu", "##ok", "##kas", "ate", ",", "."]
    core = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Words(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"))
    said = ["the untrainable quokkas ate", "The UNTRAINABLE, quokkas. ate"]
    found = [words([np.array(core.encode(text).ids, dtype=np.int32)])[0].tolist() for text in said]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


@given(text=st.text(st.sampled_from("ab 1,.\n"), max_size=60))
def test_a_words_hash_does_not_depend_on_how_it_was_cut_into_tokens(tokenizer: Any, text: str) -> None:
    words = Words(tokenizer)
    whole = tokenizer(text)["input_ids"]
    letters = [token for letter in text for token in tokenizer(letter)["input_ids"]]
    found = [words([np.array(ids, dtype=np.int32)])[0].tolist() for ids in (whole, letters)]
    assert found[0] == found[1]
    assert len(found[0]) == len(by_hand(text))


class Vocabulary:
    """As much of a tokenizer as its words depend on."""

    def __init__(self, pieces: Sequence[str], *, special: Sequence[str] = (), added: Sequence[str] = ()) -> None:
        self.pieces = list(pieces)
        self.all_special_tokens = list(special)
        self.added_tokens_decoder = dict(enumerate(added))

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.pieces[number] for number in ids]

    def words(self, *rows: str) -> tuple[list[list[int]], list[int]]:
        """By row of pieces between commas, the hashes of its words; and the row of each."""
        ids = [np.array([self.pieces.index(one) for one in row.split(",") if one], dtype=np.int32) for row in rows]
        hashes, owner = Words(self)(ids)
        return [hashes[owner == row].tolist() for row in range(len(rows))], owner.tolist()


def test_pieces_of_sentencepiece_and_bytes_make_the_words_of_their_text() -> None:
    pieces = [
        *("▁The", "▁", "the", "▁c", "at", "cat", "<0x63>", "<0x20>", "<0x0A>", "s", "!", "<s>", "<tool>", "Ġthe", "Ċ")
    ]
    vocabulary = Vocabulary(pieces, special=["<s>"], added=["<tool>"])
    rows = ["▁The,▁c,at", "the,<0x20>,cat", "the,<s>,<0x63>,at,!", "the,<tool>,cat", "Ġthe,Ċ,cat", "the,<0x0A>,▁,cat"]
    # A row begins a word, whatever the row before it ends with.
    rows += ["cat", "the,cat"]
    found, owner = vocabulary.words("", "!", *rows, "")
    the, cat = found[2]
    assert [] == found[0] == found[1] == found[-1]
    assert found[2:8] == [[the, cat]] * 6
    assert found[8] == [cat]
    assert len(found[9]) == 1
    assert found[9][0] not in (the, cat)
    assert owner == [row for row in range(2, 8) for _ in range(2)] + [8, 9]
    assert vocabulary.words("▁c,at,s")[0] == vocabulary.words("cat,s")[0] != vocabulary.words("s,cat")[0]
    assert Words(vocabulary)([])[0].tolist() == []


def test_rows_without_a_run_are_compared_as_a_whole_and_shares_have_four_digits() -> None:
    for short in ([5], list(range(RUN - 1))):
        seen = found([short, row(1)], [short, row(2)])
        assert (seen.equal, seen.shared) == ((0,), ())
    assert (found([[], row(1)], [row(2)]).equal, found([[], row(1)], [row(2)]).shared) == ((), ())
    assert (found([[5], [6, 7]], [row(2), [6, 7]]).equal, found([[5]], [row(2)]).shared) == ((1,), ())
    assert found([[5]], []).equal == ()
    copied = [*row(80, 20), *row(81, 4)]
    # Of 12 runs the first seven are there.
    assert found([copied, row(82)], [row(83), copied[: RUN + 6]]).named == (("rows.jsonl:1", "rows.jsonl:2", 0.5833),)


def test_sums_that_share_their_digits_do_not_make_rows_alike(tokenizer: Any) -> None:
    """For a tokenizer whose digits are tokens, a calculation is a run of more than 13; words tell rows apart."""
    texts = [
        "Ann has 12 pears. <<12*1200=14400>>14400 in all",
        "Every bus holds 51 people: <<12*1200=14400>>14400 seats",
    ]
    test, train = ([tokenizer(text)["input_ids"]] for text in texts)
    assert found(test, train).shared == (0,)
    assert overlap(Split(test), [0], Split(train), Words(tokenizer)).shared == ()  # type: ignore[arg-type]
