"""The order in which data is seen: a pure function of (number of items, seed, position).

Nothing here depends on the number of workers, on gradient accumulation or on earlier calls; that makes a resume exact
and a change of world size harmless. The permutation is finray's own (SplitMix64, Steele et al. 2014) because NumPy's
streams may change between versions; docs/formats.md specifies it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from finray.config.resolved import Steps

UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser, elementwise."""
    with np.errstate(over="ignore"):
        z = values + _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from a path of parts: the first eight bytes, big-endian, of the SHA-256 of ``a/b/c``."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def permutation(count: int, *key: int | str) -> IntArray:
    """The permutation of ``range(count)`` for a key: indices sorted by their keyed hash, ties by index."""
    start = np.uint64(derive_key(*key))
    with np.errstate(over="ignore"):
        hashes = mix(start + np.arange(count, dtype=np.uint64) * _GAMMA)
    return np.argsort(hashes, kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A share of one optimizer step: ``index`` counts micro-batches within the step, over all ranks."""

    index: int
    items: tuple[int, ...]


class Order:
    """The stream of items (packs or rows) over all epochs.

    Position p of the stream is in epoch ``p // count``; each epoch has its own permutation. A step takes the next
    ``global_batch_size`` positions, across epoch boundaries too, so every step but the last has equal size.

    Args:
        count: number of items.
        seed: seed of the permutations.
        total: length of the stream; None for an infinite one.
    """

    def __init__(self, count: int, *, seed: int, total: int | None = None) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self.count = count
        self.total = total
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(count, "epoch", seed, epoch))

    def batch(self, position: int, size: int) -> list[int]:
        """The ``size`` items from ``position`` on; fewer at the end of the stream."""
        stop = position + size if self.total is None else min(position + size, self.total)
        return [int(self._epoch(at // self.count)[at % self.count]) for at in range(position, stop)]


def micro_batches(batch: list[int], *, micro_batch_size: int, rank: int, world_size: int) -> list[MicroBatch]:
    """The micro-batches of one rank: every ``world_size``-th of the step's, so that any world size covers the step."""
    pieces = [
        MicroBatch(index, tuple(batch[at : at + micro_batch_size]))
        for index, at in enumerate(range(0, len(batch), micro_batch_size))
    ]
    return pieces[rank::world_size]


def total_steps(count: int, steps: Steps, *, max_steps: int | None) -> tuple[int, int | None]:
    """Number of optimizer steps of a run over ``count`` packs (or rows), and the length of the stream in items (None if
    ``max_steps`` decides)."""
    if max_steps is not None:
        return max_steps, None
    total = max(1, round(count * steps.epochs))
    return -(-total // steps.global_batch_size), total
