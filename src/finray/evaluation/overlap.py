"""Rows that a model was trained on: a score on them says what it remembers, not what it can do.

Whole rows are compared by the digest of their tokens, and runs of 13 words by a hash, after Brown et al. 2020
(appendix C). Runs of tokens would not do: each digit is a token for many tokenizers, so that rows of arithmetic share
them by chance. What belongs to a template is in many rows and says nothing; runs that are in more than ten training
rows, or in half of the evaluated ones, do not count.
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
# Training rows in which a run may be and still tell one row from another.
_COMMON = 10
# Training tokens that are hashed at a time.
_TOKENS = 2**20
# Rows that are named.
_NAMED = 20
# Words of rows of token ids: the hash of each, and the index of its row.
Split = Callable[[Sequence[npt.NDArray[np.int32]]], tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]
# The base of the hash of a word's characters: odd, so that it has an inverse modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_UNPUNCTUATED = str.maketrans("", "", string.punctuation)


class Words:
    """Cuts rows of token ids into words: lower case, without ASCII punctuation, between white space.

    A word's hash follows from its characters, not from how it was cut into tokens. No row is decoded: each entry of the
    vocabulary is looked at once, and a word's hash is joined from those of its tokens as they lie in memory.

    Args:
        tokenizer: of Transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        # WordPiece marks what continues a word, all others what begins one.
        marks_continued = sum(str(piece).startswith("##") for piece in pieces) > len(pieces) // 100
        special = set(tokenizer.all_special_tokens) | {str(one) for one in tokenizer.added_tokens_decoder.values()}
        begins, hashes, lengths = [], [], []
        for piece in map(str, pieces):
            text = " " if piece in special else re.sub("[\u0120\u2581\u010a\u0109\u010d]", " ", piece)
            text = re.sub("<0x([0-9A-F]{2})>", lambda found: chr(int(found[1], 16)), text)
            if marks_continued:
                text = text.removeprefix("##") if piece.startswith("##") else f" {text}"
            letters = "".join(text.lower().translate(_UNPUNCTUATED).split())
            value = 0
            for letter in letters:
                value = (value * _BASE + ord(letter)) % 2**64
            begins.append(bool(re.search(r"\s", text)))
            hashes.append(value)
            lengths.append(len(letters))
        self._begins = np.array(begins, dtype=bool)
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
        # are sums of neighbours, and a last factor puts each right.
        up = np.multiply.accumulate(self._powers[self._lengths[ids]])
        down = np.multiply.accumulate(self._inverse[self._lengths[ids]])
        last = np.append(starts[1:], len(ids)) - 1
        found = np.add.reduceat(self._hashes[ids] * down, starts) * up[last]
        has_letters = np.add.reduceat(self._lengths[ids], starts) > 0
        return mix(found[has_letters]), owner[starts][has_letters]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Evaluated rows that the training rows hold.

    Attributes:
        equal: indices of rows that are there whole.
        shared: indices of other rows that share a run of 13 words.
        named: of the first of them: the row, the training row, and the share of its runs that are there.
    """

    equal: tuple[int, ...]
    shared: tuple[int, ...]
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
    """Which of some rows of a split are in the training rows.

    Memory is that of the evaluated rows: a hash for each of their words. Training rows stream by.

    Args:
        split: of the evaluated rows.
        numbers: which of them.
        train: the training rows, as they were prepared by the same tokenizer.
        words: cuts rows into words.
    """
    equal_to = _equal(split, numbers, train)
    hashed = [np.unique(_runs(*words([split.row(number)[0]]))[0]) for number in numbers]
    every, times = np.unique(np.concatenate([np.empty(0, np.uint64), *hashed]), return_counts=True)
    seen = np.zeros(len(every), dtype=np.int32)
    holder = np.full(len(every), -1, dtype=np.int64)
    start = 0
    while start < len(train) and len(every):
        stop = start + max(1, int(np.searchsorted(np.cumsum(train.lengths[start:]), _TOKENS)))
        ids = [train.row(row)[0] for row in range(start, min(stop, len(train)))]
        found, rows = _runs(*words(ids))
        place = np.minimum(np.searchsorted(every, found), len(every) - 1)
        is_there = every[place] == found
        # A run twice in a row counts once.
        pairs = np.unique(np.stack([place[is_there], rows[is_there]]), axis=1)
        np.add.at(seen, pairs[0], 1)
        holder[pairs[0]] = np.where(holder[pairs[0]] < 0, pairs[1] + start, holder[pairs[0]])
        start = stop
    common = max(2, len(numbers) / 2) if len(numbers) > 1 else 2
    tells = (seen > 0) & (seen <= _COMMON) & (times < common)
    shared: list[int] = []
    named: list[tuple[str, str, float]] = []
    for index, own in enumerate(hashed):
        place = np.searchsorted(every, own)
        telling = place[tells[place]] if len(own) else place
        if index not in equal_to and not len(telling):
            continue
        if index not in equal_to:
            shared.append(index)
        if len(named) < _NAMED:
            other = equal_to.get(index)
            if other is None:
                other = int(np.bincount(holder[telling]).argmax())
            share = 1.0 if index in equal_to else len(telling) / len(own)
            named.append((split.where(int(numbers[index])), train.where(other), round(share, 4)))
    return Overlap(tuple(equal_to), tuple(shared), tuple(named))


def _equal(split: PreparedSplit, numbers: Sequence[int], train: PreparedSplit) -> dict[int, int]:
    """Index of each row that is a training row, and the first such training row."""
    own = split.digests[np.asarray(numbers, dtype=np.int64)]
    order = np.argsort(train.digests, kind="stable")
    place = np.minimum(np.searchsorted(train.digests[order], own), max(len(order) - 1, 0))
    if not len(order):
        return {}
    alike = np.flatnonzero(train.digests[order[place]] == own)
    return {int(index): int(order[place[index]]) for index in alike}


def _runs(
    words: npt.NDArray[np.uint64], owner: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """A hash of every run of 13 words within a row, and the index of its row."""
    if len(words) < RUN:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    factor, total = np.uint64(_BASE), np.zeros(len(words) - RUN + 1, dtype=np.uint64)
    for place in range(RUN):
        total = total * factor + words[place : place + len(total)]
    whole = owner[: len(total)] == owner[RUN - 1 :]
    return mix(total)[whole], owner[: len(total)][whole]
