"""Packing: joins rows so that almost every position of a forward pass holds a real token.

Best-fit decreasing (Johnson 1973): rows from the longest to the shortest, each into the fullest pack that still has
room. The plan is computed once for the whole dataset and depends only on the row lengths.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from finray.data.sampling.groups import Groups

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The rows of each pack."""

    rows: IntArray  # row numbers, pack after pack
    starts: IntArray  # start of each pack in ``rows``, and finally its length; one longer than the number of packs
    capacity: int  # maximum tokens per pack
    tokens: int  # tokens in all packs

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pack(self, index: int) -> tuple[int, ...]:
        """Row numbers of one pack."""
        return tuple(int(row) for row in self.rows[self.starts[index] : self.starts[index + 1]])

    def in_rows(self, groups: Groups) -> PackPlan:
        """Where this plan is of groups: the same packs, of their rows."""
        if groups.is_single:
            return self
        ends = np.append(0, np.cumsum(np.diff(groups.starts)[self.rows]))
        return replace(self, rows=groups.rows(self.rows), starts=ends[self.starts])

    @property
    def fill(self) -> float:
        """Share of the packs' positions that hold a token."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 0.0


def plan_packs(lengths: npt.ArrayLike, capacity: int) -> PackPlan:
    """Pack rows of the given lengths.

    Open packs are indexed by their remaining room; a bit set over room sizes finds the smallest sufficient one, so a
    row costs O(capacity / 64), independent of the number of packs. Raises ValueError: a row is longer than a pack.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a row of {int(sizes.max())} tokens does not fit a pack of {capacity}")
    by_length = np.argsort(-sizes, kind="stable")
    # Capacity beyond the total length is never used.
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
    """The plan without packing: one row per pack."""
    sizes = np.asarray(lengths, dtype=np.int64)
    count = len(sizes)
    return PackPlan(np.arange(count), np.arange(count + 1), capacity, int(sizes.sum()))


def equal_length_batches(lengths: npt.ArrayLike, capacity: int) -> PackPlan:
    """The plan for a model whose rows cannot be packed: batches of rows of one length, shortest first."""
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = np.argsort(sizes, kind="stable")
    values, first, counts = np.unique(sizes[rows], return_index=True, return_counts=True)
    starts = [
        start
        for size, at, count in zip(values.tolist(), first.tolist(), counts.tolist(), strict=True)
        for start in range(at, at + count, max(1, capacity // max(1, size)))
    ]
    return PackPlan(rows, np.array([*starts, len(rows)], dtype=np.int64), capacity, int(sizes.sum()))
