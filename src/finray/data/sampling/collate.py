"""Rows laid end to end: one sequence per micro-batch, with no padding.

Attention and positions restart at every row; only positions whose next token is learned appear among the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of T tokens in S rows with K targets.

    Attributes:
        tokens_1T: int64 token ids.
        positions_1T: int64 position of each token within its row.
        lengths: tokens per row, S entries.
        cu_seqlens: int32 cumulative lengths, from 0 to T (the ``cu_seqlens`` of variable-length attention).
        target_positions_K: int64 positions in the sequence whose next token is learned.
        targets_K: int64 the tokens to predict there.
        rows: row numbers in the prepared split.
    """

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    target_positions_K: torch.Tensor
    targets_K: torch.Tensor
    rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.tokens_1T.shape[1])

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; the copies do not wait for what the device does, as the memory is pinned."""
        if device.type == "cpu":
            return self
        held = self if self.tokens_1T.is_pinned() else self.pin_memory()
        return held._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The batch in memory that a GPU can fetch by itself."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = (self.tokens_1T, self.positions_1T, self.cu_seqlens, self.target_positions_K, self.targets_K)
        tokens, positions, starts, at, targets = map(change, tensors)
        return Batch(tokens, positions, self.lengths, starts, at, targets, self.rows)


def collate(rows: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]], numbers: Sequence[int]) -> Batch:
    """Join rows of (ids, mask) into a batch."""
    lengths = tuple(len(ids) for ids, _ in rows)
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    tokens = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    mask = np.concatenate([mask for _, mask in rows]).astype(bool)
    # The first token of a row is predicted by nothing; without this the last token of the row before would try.
    mask[starts[:-1]] = False
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts[:-1].astype(np.int64), lengths)
    learned = np.flatnonzero(mask)
    return Batch(
        tokens_1T=torch.from_numpy(tokens)[None],
        positions_1T=torch.from_numpy(positions)[None],
        lengths=lengths,
        cu_seqlens=torch.from_numpy(starts),
        target_positions_K=torch.from_numpy(learned - 1),
        targets_K=torch.from_numpy(tokens[learned]),
        rows=tuple(numbers),
    )
