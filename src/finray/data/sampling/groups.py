"""Rows that belong together: a pair, or the answers to one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """Consecutive rows that splits, mixes, packs, micro-batches and ranks never tear. Usually each row is its own."""

    starts: IntArray  # the first row of each group, and finally the number of rows

    @classmethod
    def single(cls, rows: int) -> Groups:
        """Each row its own."""
        return cls(np.arange(rows + 1))

    @classmethod
    def of(cls, follows: IntArray) -> Groups:
        """From 1 for each row that belongs with the row before it, and 0 for the first of a group."""
        return cls(np.append(np.flatnonzero(follows == 0), len(follows)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def is_single(self) -> bool:
        """Whether each row is its own group."""
        return len(self) == int(self.starts[-1])

    def sums(self, of_rows: IntArray) -> IntArray:
        """Sums over the rows of each group."""
        return of_rows if self.is_single else np.add.reduceat(of_rows, self.starts[:-1])

    def rows(self, groups: IntArray) -> IntArray:
        """The row numbers of groups, in this order."""
        if self.is_single:
            return groups
        sizes = np.diff(self.starts)[groups]
        before = np.cumsum(sizes) - sizes
        return np.repeat(self.starts[groups] - before, sizes) + np.arange(int(sizes.sum()))
