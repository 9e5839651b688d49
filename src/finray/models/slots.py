"""The KV cache of running rows, in a fixed set of slots; a forward pass adds one token to some, a prompt to others.

Rows are packed, as in training, so nothing is padded except the scores of one token against its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from finray.models.attention import Scores, attend

# The slots grow by at least this many tokens.
_GROWTH = 64


class Slots:
    """KV cache of every layer: keys and values, each (S, H_kv, C, D).

    Layers are identified by their order in a forward pass. Memory is allocated as needed: for S rows of the longest
    length so far, independent of the number of rows that pass through.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.capacity = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens."""
        if length <= self.capacity:
            return
        capacity = max(length, self.capacity + max(_GROWTH, self.capacity // 4))
        for number, old in enumerate(self.layers):
            grown = self._allocated(*old, capacity)
            for tensor, before in zip(grown, old, strict=True):
                tensor[:, :, : before.shape[2]] = before
            self.layers[number] = grown
        # If memory runs out before, the slots are as long as they were.
        self.capacity = capacity

    def layer(self, number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, allocated on first use."""
        if number == len(self.layers):
            self.layers.append(self._allocated(key, value, self.capacity))
        return self.layers[number]

    def _allocated(self, key: torch.Tensor, value: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, because masked entries must be finite, with the heads, widths and dtype of ``key`` and ``value``."""
        shape = (self.count, key.shape[1], capacity)
        values = value.new_zeros((*shape, value.shape[3]))
        if _by_products(key):
            # In the order in which products with queries read them.
            return key.new_zeros((*shape[:2], key.shape[3], shape[2])).transpose(2, 3), values
        return key.new_zeros((*shape, key.shape[3])), values

    def share(self, length: int) -> None:
        """Copy the first tokens of the first slot to all others."""
        for keys, values in self.layers:
            keys[1:, :, :length] = keys[:1, :, :length]
            values[1:, :, :length] = values[:1, :, :length]

    def clear(self, slot: int, length: int) -> None:
        """Zero the first tokens of a slot: what a row has left there may not be finite, and would reach the next one
        although it is masked."""
        for keys, values in self.layers:
            keys[slot, :, :length] = 0
            values[slot, :, :length] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a slot to another."""
        for keys, values in self.layers:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of a row that begin at a position of their slot; earlier ones are already cached."""

    slot: int
    start: int
    length: int


class Step:
    """One forward pass: one token for each of the first slots, then tokens of new rows.

    Args:
        slots: the KV cache.
        positions: position of the new token in slot 0, 1, 2 ...
        prefills: tokens of new rows.
        device: of the model.
    """

    def __init__(
        self, slots: Slots, positions: Sequence[int], prefills: Sequence[Prefill], device: torch.device
    ) -> None:
        self._slots, self._prefills, self._layer = slots, prefills, 0
        self._positions_B = torch.tensor(positions, dtype=torch.int64, device=device)
        self._longest = max(positions, default=0) + 1
        self._rows_B = torch.arange(len(positions), device=device)
        self._bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See :class:`finray.models.attention.Layout`."""
        keys, values = self._slots.layer(self._layer, key, value)
        self._layer += 1
        count, parts = len(self._positions_B), []
        if count:
            # An index on either side of a slice: the rows come first.
            keys[self._rows_B, :, self._positions_B] = key[0, :, :count].transpose(0, 1)
            values[self._rows_B, :, self._positions_B] = value[0, :, :count].transpose(0, 1)
            parts.append(self._attend_one_each(query[0, :, :count], keys[:count], values[:count], scores))
        at = count
        for prefill in self._prefills:
            span, end = slice(at, at + prefill.length), prefill.start + prefill.length
            keys[prefill.slot, :, prefill.start : end] = key[0, :, span]
            values[prefill.slot, :, prefill.start : end] = value[0, :, span]
            seen = key[:, :, span], value[:, :, span]
            if prefill.start:
                slot = slice(prefill.slot, prefill.slot + 1)
                # Contiguous keys: torch's fused kernel takes no others.
                seen = keys[slot, :, :end].contiguous(), values[slot, :, :end]
            parts.append(attend(query[:, :, span], *seen, scores).transpose(1, 2))
            at = span.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_one_each(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Attention (1, B, H, D) of one query (H, B, D) for each slot, keys (B, H_kv, C, D)."""
        heads, count, width = query.shape
        shared = keys.shape[1]
        bias = self._bias_of(scores.window, query.dtype)
        keys, values = keys[:, :, : self._longest], values[:, :, : self._longest]
        query = query.transpose(0, 1).reshape(count, shared, heads // shared, width)
        if scores.softcap is None and scores.sinks is None and not _by_products(query):
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scores.scaling)
            return out.reshape(1, count, heads, -1)
        scale = width**-0.5 if scores.scaling is None else scores.scaling
        products = query @ keys.transpose(-1, -2) * scale
        if scores.softcap is not None:
            products = torch.tanh(products / scores.softcap) * scores.softcap
        weights = products + bias
        if scores.sinks is not None:
            column = scores.sinks.view(1, shared, -1, 1).expand(count, -1, -1, -1)
            weights = torch.cat([weights, column.to(weights.dtype)], dim=-1)
        weights = weights.float().softmax(-1)[..., : keys.shape[2]].to(query.dtype)
        return (weights @ values).reshape(1, count, heads, -1)

    def _bias_of(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, 1, longest): 0 for visible tokens, minus infinity for others."""
        bias = self._bias.get((window, dtype))
        if bias is None:
            steps_L = torch.arange(self._longest, device=self._positions_B.device)
            ahead_BL = steps_L > self._positions_B[:, None]
            if window is not None:
                ahead_BL |= steps_L <= self._positions_B[:, None] - window
            bias = torch.zeros(ahead_BL.shape, dtype=dtype, device=ahead_BL.device)
            bias = bias.masked_fill_(ahead_BL, float("-inf"))[:, None, None]
            self._bias[window, dtype] = bias
        return bias


def _by_products(tensor: torch.Tensor) -> bool:
    """Whether plain products attend to cached tokens: on a CPU in fp32 they take two thirds of the fused kernel's
    time."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class Branches:
    """Continuations of contexts, with each context computed once: continuations see their context, but not each other.

    Args:
        lengths: per context, its number of tokens and those of its continuations (none is 0), all packed.
    """

    def __init__(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._lengths = lengths

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See :class:`finray.models.attention.Layout`."""
        parts, at = [], 0
        for context, continuations in self._lengths:
            stem = slice(at, at + context)
            parts.append(attend(query[:, :, stem], key[:, :, stem], value[:, :, stem], scores))
            at += context
            for length in continuations:
                span = slice(at, at + length)
                seen = [torch.cat([tensor[:, :, stem], tensor[:, :, span]], dim=2) for tensor in (key, value)]
                parts.append(attend(query[:, :, span], seen[0], seen[1], scores))
                at += length
        return torch.cat(parts, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Laid:
    """Packed tokens with their layout, as a batch for :class:`finray.models.packed.PackedModel`.

    Attributes:
        tokens_1T: int64 token ids.
        positions_1T: int64 positions within rows.
        lengths: tokens of each piece.
        ends: largest position of each piece, plus one.
        cu_seqlens: int32 cumulative lengths.
        layout: attends.
    """

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    lengths: tuple[int, ...]
    ends: tuple[int, ...]
    cu_seqlens: torch.Tensor
    layout: Step | Branches

    @classmethod
    def of(cls, pieces: Sequence[tuple[Sequence[int], int]], layout: Step | Branches, device: torch.device) -> Laid:
        """From pieces of (token ids, position of the first)."""
        lengths = tuple(len(tokens) for tokens, _ in pieces)
        last = tuple(start + len(tokens) for tokens, start in pieces)
        tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, _ in pieces])
        positions = np.concatenate([np.arange(start, start + len(tokens)) for tokens, start in pieces])
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        tensors = (torch.from_numpy(array).to(device) for array in (tokens, positions, ends))
        tokens_T, positions_T, cu_seqlens = tensors
        return cls(tokens_T[None], positions_T[None], lengths, last, cu_seqlens, layout)
