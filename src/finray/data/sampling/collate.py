"""Packed rows: one sequence per micro-batch, with no padding.

Attention and positions restart at every row; only positions whose next token is trained on are targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
# By name, one for each row or each target.
Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """T tokens in S rows."""

    tokens_1T: torch.Tensor  # int64 token ids
    positions_1T: torch.Tensor  # int64 position of each token within its row
    lengths: tuple[int, ...]  # tokens per row, S entries
    cu_seqlens: torch.Tensor  # int32 cumulative lengths, from 0 to T (the ``cu_seqlens`` of variable-length attention)
    rows: tuple[int, ...]  # row numbers in the prepared split
    values: Mapping[str, torch.Tensor]  # what the objective knows of the rows, by name

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.tokens_1T.shape[1])

    def to(self, device: torch.device) -> Self:
        """The batch on a device; the copies are asynchronous, because the memory is pinned."""
        if device.type == "cpu":
            return self
        held = self if self.tokens_1T.is_pinned() else self.pin_memory()
        return held._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The batch in pinned memory."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        held: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: change(tensor) for name, tensor in held.items() if isinstance(tensor, torch.Tensor)
        }
        values = {name: change(tensor) for name, tensor in self.values.items()}
        return replace(self, **moved, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(JoinedRows):
    """A micro-batch with K targets."""

    target_positions_K: torch.Tensor  # int64 positions in the sequence whose next token is a target
    targets_K: torch.Tensor  # int64 target tokens
    targets_per_row: tuple[int, ...]  # S entries
    # Where rows of a group branch from a common prompt: its tokens, and those of each row after it, for each group.
    # ``lengths`` are then of these pieces.
    branches: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def row_sums(self, values_K: torch.Tensor) -> torch.Tensor:
        """Sums over the targets of each row (S), which its neighbours do not change."""
        return torch.stack([values.sum() for values in torch.split(values_K, list(self.targets_per_row))])


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledBatch(JoinedRows):
    """A micro-batch of rows for a head that reads each as a whole."""

    token_types_1T: torch.Tensor  # int64, 0 for tokens of the first text of a row and 1 for those of the second

    @property
    def labels_S(self) -> torch.Tensor:
        """int64 classes; fp32 targets for numbers, or (S, C) if a row may have several classes."""
        return self.values["labels"]


def _joined(rows: Sequence[Row], numbers: Sequence[int], values: Values) -> dict[str, Any]:
    """The fields of :class:`JoinedRows`."""
    lengths = tuple(len(ids) for ids, _ in rows)
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    tokens = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts[:-1].astype(np.int64), lengths)
    return {
        "tokens_1T": torch.from_numpy(tokens)[None],
        "positions_1T": torch.from_numpy(positions)[None],
        "lengths": lengths,
        "cu_seqlens": torch.from_numpy(starts),
        "rows": tuple(numbers),
        "values": {name: torch.from_numpy(array) for name, array in values.items()},
    }


def collate(rows: Sequence[Row], numbers: Sequence[int], values: Values = MappingProxyType({})) -> Batch:
    """Join rows of (ids, loss mask) into a batch."""
    tokens = np.concatenate([ids for ids, _ in rows])
    mask = np.concatenate([mask for _, mask in rows]).astype(bool)
    # Nothing predicts the first token of a row; otherwise the last token of the previous row would.
    starts = np.cumsum([0, *(len(ids) for ids, _ in rows[:-1])])
    mask[starts] = False
    learned, counts = np.flatnonzero(mask), tuple(np.add.reduceat(mask, starts, dtype=np.int64).tolist())
    at, targets = torch.from_numpy(learned - 1), torch.from_numpy(tokens[learned].astype(np.int64))
    return Batch(**_joined(rows, numbers, values), target_positions_K=at, targets_K=targets, targets_per_row=counts)


def collate_branches(rows: Sequence[Row], numbers: Sequence[int], values: Values, sizes: Sequence[int]) -> Batch:
    """As :func:`collate`, but what rows of a group (of ``sizes``) have in common at their beginning is there once."""
    pieces: list[tuple[npt.NDArray[np.int32], int]] = []
    branches, places, targets = list[tuple[int, tuple[int, ...]]](), list[Any](), list[Any]()
    first = at = 0
    for size in sizes:
        group = rows[first : first + size]
        first += size
        shortest = min(len(ids) for ids, _ in group) - 1
        same = np.all([ids[:shortest] == group[0][0][:shortest] for ids, _ in group], axis=0)
        stem = 0 if size == 1 else shortest if same.all() else int(same.argmin())
        stem_at, at = at, at + stem
        if stem:
            pieces.append((group[0][0][:stem], 0))
            branches.append((stem, tuple(len(ids) - stem for ids, _ in group)))
        else:
            branches += [(len(ids), ()) for ids, _ in group]
        for ids, mask in group:
            learned = np.flatnonzero(mask[1:])
            # Where each token is to which the next one is a target.
            places.append(np.where(learned < stem, stem_at + learned, at + learned - stem))
            targets.append(ids[1:][learned])
            pieces.append((ids[stem:], stem))
            at += len(ids) - stem
    joined = _joined([(ids, ids) for ids, _ in pieces], numbers, values)  # type: ignore[misc]
    joined["positions_1T"] += torch.from_numpy(np.repeat([begin for _, begin in pieces], joined["lengths"]))
    return Batch(
        **joined,
        target_positions_K=torch.from_numpy(np.concatenate(places)),
        targets_K=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        targets_per_row=tuple(map(len, targets)),
        branches=tuple(branches),
    )


def collate_labelled(rows: Sequence[Row], numbers: Sequence[int], values: Values) -> LabelledBatch:
    """Join rows of (ids, token types) into a batch."""
    types = torch.from_numpy(np.concatenate([types for _, types in rows]).astype(np.int64))[None]
    return LabelledBatch(**_joined(rows, numbers, values), token_types_1T=types)
