"""Packs: rows joined so that almost every position of a forward pass holds a real token.

Best-fit decreasing (Johnson 1973): rows from the longest to the shortest, each into the fullest pack that still has
room. The plan is made once for the whole data set and depends on the row lengths alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Which rows each pack holds.

    Attributes:
        rows: row numbers, pack after pack.
        starts: where each pack begins in ``rows``, and at the end its length; one longer than the number of packs.
        capacity: most tokens in a pack.
        tokens: tokens in all packs.
    """

    rows: IntArray
    starts: IntArray
    capacity: int
    tokens: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pack(self, index: int) -> tuple[int, ...]:
        """Row numbers of one pack."""
        return tuple(int(row) for row in self.rows[self.starts[index] : self.starts[index + 1]])

    @property
    def fill(self) -> float:
        """Share of the packs' positions that hold a token."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 0.0


def plan_packs(lengths: npt.ArrayLike, capacity: int) -> PackPlan:
    """Pack rows of the given lengths.

    Each open pack is filed under the room it has left; a bit set over room sizes finds the smallest that is enough,
    so a row costs O(capacity / 64) whatever the number of packs.

    Raises:
        ValueError: a row is longer than a pack.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a row of {int(sizes.max())} tokens does not fit a pack of {capacity}")
    by_length = np.argsort(-sizes, kind="stable")
    # All rows together are room enough, where a pack would take more.
    whole = min(capacity, int(sizes.sum()))
    open_packs: dict[int, list[int]] = defaultdict(list)
    occupied = 0
    packs: list[list[int]] = []
    for row, size in zip(by_length.tolist(), sizes[by_length].tolist(), strict=True):
        candidates = occupied >> size
        if candidates:
            room = size + (candidates & -candidates).bit_length() - 1
            shelf = open_packs[room]
            pack = shelf.pop()
            if not shelf:
                occupied &= ~(1 << room)
        else:
            room = whole
            pack = len(packs)
            packs.append([])
        packs[pack].append(row)
        left = room - size
        if left:
            open_packs[left].append(pack)
            occupied |= 1 << left
    starts = np.zeros(len(packs) + 1, dtype=np.int64)
    np.cumsum([len(pack) for pack in packs], out=starts[1:])
    rows = np.fromiter((row for pack in packs for row in pack), dtype=np.int64, count=int(starts[-1]))
    return PackPlan(rows, starts, capacity, int(sizes.sum()))


def one_row_each(lengths: npt.ArrayLike, capacity: int) -> PackPlan:
    """The plan without packing: every row is a pack of its own."""
    sizes = np.asarray(lengths, dtype=np.int64)
    count = len(sizes)
    return PackPlan(np.arange(count), np.arange(count + 1), capacity, int(sizes.sum()))


def one_length_each(lengths: npt.ArrayLike, capacity: int) -> PackPlan:
    """The plan of a model whose rows cannot be joined: packs of rows of one length, the shortest first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = np.argsort(sizes, kind="stable")
    values, first, counts = np.unique(sizes[rows], return_index=True, return_counts=True)
    starts = [
        start
        for size, at, count in zip(values.tolist(), first.tolist(), counts.tolist(), strict=True)
        for start in range(at, at + count, max(1, capacity // max(1, size)))
    ]
    return PackPlan(rows, np.array([*starts, len(rows)], dtype=np.int64), capacity, int(sizes.sum()))
