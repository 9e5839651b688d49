"""Overlap with the training data: a score on rows that a model was trained on measures memorization.

Whole rows are compared by the digest of their tokens, and runs of 13 words by a hash, following Brown et al. 2020
(appendix C). Runs of tokens would not work: for many tokenizers each digit is a token, so that rows of arithmetic share
them by chance. Template text says nothing: runs that are in more than ten training rows, or in half of the evaluated
ones, do not count, nor do runs with a word of a template. A template's last words and a row's first make runs that few
rows have; so words are also compared five at a time, and those that are in half of the training rows are a template's.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.order import mix

RUN = 13
# Words at a time by which a template is recognized.
_TEMPLATE_RUN = 5
# A run that is in more training rows than this is ignored.
_COMMON = 10
# Training tokens hashed at a time.
_TOKENS = 2**20
# Maximum number of overlapping rows that are reported.
_NAMED = 20
# Splits rows of token ids into words: the hash of each, and the index of its row.
Split = Callable[[Sequence[npt.NDArray[np.int32]]], tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]
# The base of the polynomial hash of a word's characters: odd, so that it has an inverse modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_UNPUNCTUATED = str.maketrans("", "", string.punctuation)


class Words:
    """Splits rows of token ids into words: lower case, without ASCII punctuation, at white space.

    A word's hash depends on its characters, not on its tokenization. No row is decoded: each vocabulary entry is
    processed once, and a word's hash is combined from those of its tokens.

    Args:
        tokenizer: a Transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        # WordPiece marks continuations of a word, all others mark its start.
        marks_continued = sum(str(piece).startswith("##") for piece in pieces) > len(pieces) // 100
        special = set(tokenizer.all_special_tokens) | {str(token) for token in tokenizer.added_tokens_decoder.values()}
        begins, hashes, lengths = [], [], []
        for piece in map(str, pieces):
            text = " " if piece in special else re.sub("[\u0120\u2581\u010a\u0109\u010d]", " ", piece)
            text = re.sub("<0x([0-9A-F]{2})>", lambda match: chr(int(match[1], 16)), text)
            if marks_continued:
                text = text.removeprefix("##") if piece.startswith("##") else f" {text}"
            letters = "".join(text.lower().translate(_UNPUNCTUATED).split())
            value = 0
            for letter in letters:
                value = (value * _BASE + ord(letter)) % 2**64
            begins.append(bool(re.search(r"\s", text)))
            hashes.append(value)
            lengths.append(len(letters))
        self._begins = np.array(begins)
        self._hashes = np.array(hashes, dtype=np.uint64)
        self._lengths = np.array(lengths, dtype=np.int64)
        most = int(self._lengths.max(initial=0))
        inverse = pow(_BASE, -1, 2**64)
        self._powers = np.array([pow(_BASE, count, 2**64) for count in range(most + 1)], dtype=np.uint64)
        self._inverse = np.array([pow(inverse, count, 2**64) for count in range(most + 1)], dtype=np.uint64)

    def __call__(self, rows: Sequence[npt.NDArray[np.int32]]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The hash of each word, and the index of its row."""
        ids = np.concatenate([np.empty(0, np.int32), *rows])
        if not len(ids):
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        begins = self._begins[ids] | (np.diff(owner, prepend=-1) != 0)
        starts = np.flatnonzero(begins)
        # The hash of letters l1 .. ln is the sum of li * BASE**(n - i): with powers that run on over all rows, words
        # are sums over neighbours, and a final factor normalizes each.
        up = np.multiply.accumulate(self._powers[self._lengths[ids]])
        down = np.multiply.accumulate(self._inverse[self._lengths[ids]])
        last = np.append(starts[1:], len(ids)) - 1
        hashes = np.add.reduceat(self._hashes[ids] * down, starts) * up[last]
        has_letters = np.add.reduceat(self._lengths[ids], starts) > 0
        return mix(hashes[has_letters]), owner[starts][has_letters]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Evaluated rows that are in the training data."""

    equal: tuple[int, ...]  # indices of rows that are training rows
    shared: tuple[int, ...]  # indices of other rows that share a run of 13 words with one
    # For the first of them: the row, the training row, and the share of its runs found there.
    named: tuple[tuple[str, str, float], ...]

    @property
    def rows(self) -> frozenset[int]:
        """All of them."""
        return frozenset((*self.equal, *self.shared))

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        named = [{"row": row, "training_row": other, "shared": share} for row, other, share in self.named]
        return {"equal": len(self.equal), "shares_13_words": len(self.shared), "rows": named}


def overlap(split: PreparedSplit, numbers: Sequence[int], train: PreparedSplit, words: Split) -> Overlap:
    """Find rows of a split that are in the training rows.

    Memory is proportional to the evaluated rows: a hash per word. Training rows are streamed.

    Args:
        split: of the evaluated rows.
        numbers: indices of these rows.
        train: the training rows, prepared with the same tokenizer.
        words: splits rows into words.
    """
    equal_to = _equal(split, numbers, train)
    words_of = [words([split.row(number)[0]]) for number in numbers]
    hashed = [_runs(*words, length=RUN)[0] for words in words_of]
    short = [_runs(*words, length=_TEMPLATE_RUN)[0] for words in words_of]
    every, times = np.unique(np.concatenate([np.empty(0, np.uint64), *map(np.unique, hashed)]), return_counts=True)
    every_short = np.unique(np.concatenate([np.empty(0, np.uint64), *short]))
    seen, seen_short = np.zeros(len(every), dtype=np.int32), np.zeros(len(every_short), dtype=np.int32)
    holder = np.full(len(every), -1, dtype=np.int64)
    start = 0
    while start < len(train) and len(every):
        stop = start + max(1, int(np.searchsorted(np.cumsum(train.lengths[start:]), _TOKENS)))
        of_train = words([train.row(row)[0] for row in range(start, min(stop, len(train)))])
        pairs = _places_in(every, *_runs(*of_train, length=RUN))
        np.add.at(seen, pairs[0], 1)
        holder[pairs[0]] = np.where(holder[pairs[0]] < 0, pairs[1] + start, holder[pairs[0]])
        np.add.at(seen_short, _places_in(every_short, *_runs(*of_train, length=_TEMPLATE_RUN))[0], 1)
        start = stop
    common = max(2, len(numbers) / 2)
    tells = (seen > 0) & (seen <= _COMMON) & (times < common)
    is_template = seen_short >= max(_COMMON + 1, len(train) / 2)
    shared: list[int] = []
    named: list[tuple[str, str, float]] = []
    for index, (runs, short_runs) in enumerate(zip(hashed, short, strict=True)):
        # A short run from `at` on has a word in common with the runs that begin from `at - RUN + 1` on.
        beside = np.zeros(len(runs), dtype=bool)
        for at in np.flatnonzero(is_template[np.searchsorted(every_short, short_runs)]):
            beside[max(0, at - RUN + 1) : at + _TEMPLATE_RUN] = True
        unique = np.unique(runs[~beside])
        place = np.searchsorted(every, unique)
        telling = place[tells[place]]
        other, share = equal_to.get(index), 1.0
        if other is None:
            if not len(telling):
                continue
            shared.append(index)
        if len(named) < _NAMED:
            if other is None:
                other, share = int(np.bincount(holder[telling]).argmax()), len(telling) / len(unique)
            named.append((split.where(int(numbers[index])), train.where(other), round(share, 4)))
    return Overlap(tuple(equal_to), tuple(shared), tuple(named))


def _equal(split: PreparedSplit, numbers: Sequence[int], train: PreparedSplit) -> dict[int, int]:
    """Index of each row that is also a training row, and the first such training row."""
    digests = split.digests[np.asarray(numbers, dtype=np.int64)]
    order = np.argsort(train.digests, kind="stable")
    if not len(order):
        return {}
    place = np.minimum(np.searchsorted(train.digests[order], digests), len(order) - 1)
    alike = np.flatnonzero(train.digests[order[place]] == digests)
    return {int(index): int(order[place[index]]) for index in alike}


def _places_in(
    every: npt.NDArray[np.uint64], runs: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Index in ``every`` and row of each run that is there (2, N); a run that occurs twice in a row counts once."""
    place = np.minimum(np.searchsorted(every, runs), len(every) - 1)
    is_there = every[place] == runs
    pairs: npt.NDArray[np.int64] = np.unique(np.stack([place[is_there], rows[is_there]]), axis=1)
    return pairs


def _runs(
    words: npt.NDArray[np.uint64], owner: npt.NDArray[np.int64], *, length: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """A hash of every run of so many words within a row, and the index of its row."""
    if len(words) < length:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    factor, total = np.uint64(_BASE), np.zeros(len(words) - length + 1, dtype=np.uint64)
    for place in range(length):
        total = total * factor + words[place : place + len(total)]
    whole = owner[: len(total)] == owner[length - 1 :]
    return mix(total)[whole], owner[: len(total)][whole]
