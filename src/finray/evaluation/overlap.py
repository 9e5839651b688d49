"""Rows that a model was trained on: a score on them says what it remembers, not what it can do.

Rows are compared as token ids: whole rows by their digest, and runs of 13 tokens by a hash, after Brown et al. 2020
(appendix C), who take 13 words. What belongs to a template is in many rows and says nothing; runs that are in more than
ten training rows, or in half of the evaluated ones, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Overlap:
    """Evaluated rows that the training rows hold.

    Attributes:
        equal: indices of rows that are there whole.
        shared: indices of other rows that share a run of 13 tokens.
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
        return {"equal": len(self.equal), "shares_13_tokens": len(self.shared), "rows": named}


def overlap(split: PreparedSplit, numbers: Sequence[int], train: PreparedSplit) -> Overlap:
    """Which of some rows of a split are in the training rows.

    Memory is that of the evaluated rows: a hash for each of their tokens. Training rows stream by.

    Args:
        split: of the evaluated rows.
        numbers: which of them.
        train: the training rows, as they were prepared by the same tokenizer.
    """
    equal_to = _equal(split, numbers, train)
    hashed = [np.unique(_hashes([split.row(number)[0]])[0]) for number in numbers]
    every, times = np.unique(np.concatenate([np.empty(0, np.uint64), *hashed]), return_counts=True)
    seen = np.zeros(len(every), dtype=np.int32)
    holder = np.full(len(every), -1, dtype=np.int64)
    start = 0
    while start < len(train) and len(every):
        stop = start + max(1, int(np.searchsorted(np.cumsum(train.lengths[start:]), _TOKENS)))
        ids = [train.row(row)[0] for row in range(start, min(stop, len(train)))]
        found, rows = _hashes(ids)
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


def _hashes(rows: Sequence[npt.NDArray[np.int32]]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """A hash of every run of 13 tokens within a row, and the index of its row."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = mix(np.concatenate([np.empty(0, np.int32), *rows]).astype(np.uint64) + np.uint64(1))
    owner = np.repeat(np.arange(len(rows)), lengths)
    if len(tokens) < RUN:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    factor, total = np.uint64(0x9E3779B97F4A7C15), np.zeros(len(tokens) - RUN + 1, dtype=np.uint64)
    for place in range(RUN):
        total = total * factor + tokens[place : place + len(total)]
    whole = owner[: len(total)] == owner[RUN - 1 :]
    return mix(total)[whole], owner[: len(total)][whole]
