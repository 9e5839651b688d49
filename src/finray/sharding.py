"""Tensors that may be sharded: the rows that this rank holds, the whole of them, and filling them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from finray import compat

# Reads rows of a tensor: the first, and the one after the last.
Read = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A part of a tensor that was flattened before it was shared: ``local`` is 1-D, and ``shape`` that of the whole."""

    local: torch.Tensor
    start: int
    shape: tuple[int, ...]


class ParameterStore(Protocol):
    """Knows the value of a parameter that does not hold it itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def full_tensor(self) -> torch.Tensor:
        """All of it, on every rank; a collective."""

    def load_local(self, read: Read) -> None:
        """Copy what this rank keeps of it from a function that reads rows; no collective."""


_STORE = "_finray_store"


def attach_store(parameter: torch.Tensor, store: ParameterStore) -> None:
    """Say who knows the value of a parameter."""
    setattr(parameter, _STORE, store)


def store_of(tensor: torch.Tensor) -> ParameterStore | None:
    """Who knows the value of a parameter; None for a tensor that holds its own."""
    store: ParameterStore | None = getattr(tensor, _STORE, None)
    return store


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    store = store_of(tensor)
    return tuple(tensor.shape) if store is None else store.shape


def bytes_of(tensor: torch.Tensor | FlatShard) -> int:
    """Size of the whole tensor as it is saved."""
    if isinstance(tensor, FlatShard):
        return math.prod(tensor.shape) * tensor.local.element_size()
    store = store_of(tensor)
    dtype = tensor.dtype if store is None else store.dtype
    return math.prod(shape_of(tensor)) * dtype.itemsize


def rows_of(tensor: torch.Tensor) -> Read:
    """A function that reads rows of a tensor at hand."""
    return lambda start, stop: tensor[start:stop]


def read_elements(read: Read, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Some elements of a tensor of this shape (1-D), from a function that reads rows of it."""
    if stop <= start:
        return torch.empty(0)
    if not shape:
        return read(0, 1).reshape(1)
    width = math.prod(shape[1:])
    first = start // width
    rows = read(first, -(-stop // width)).reshape(-1)
    return rows[start - first * width : stop - first * width]


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows of a tensor that this rank holds, and the number of the first; all rows of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    local: torch.Tensor = tensor.to_local()
    return local, compat.shard_offset(tensor)[0] if tensor.ndim else 0


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different rows."""
    return isinstance(tensor, DTensor)


def is_first_replica(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same rows (hybrid sharding has several)."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return not any(
        mesh.get_local_rank(at) for at, placement in enumerate(tensor.placements) if placement.is_replicate()
    )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor, on every rank; a collective where it is sharded."""
    if (store := store_of(tensor)) is not None:
        return store.full_tensor()
    if not isinstance(tensor, DTensor):
        return tensor
    full: torch.Tensor = tensor.full_tensor()
    return full


@torch.no_grad()
def load_local(tensor: torch.Tensor, read: Read) -> None:
    """Copy rows into a tensor: those that this rank holds."""
    if (store := store_of(tensor)) is not None:
        store.load_local(read)
        return
    local, start = local_rows(tensor)
    if local.ndim == 0:
        local.copy_(read(0, 1))
    elif len(local):
        local.copy_(read(start, start + len(local)))


def sum_over_shards(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum of a plain tensor over the ranks that hold different rows of another, in place."""
    if isinstance(like, DTensor):
        for dimension, placement in enumerate(like.placements):
            if placement.is_shard():
                dist.all_reduce(values, group=like.device_mesh.get_group(dimension))
    return values


def rows_like(local: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape of which each rank holds the rows that it holds of another; plain where that is."""
    if not isinstance(like, DTensor):
        return local
    return compat.dtensor_like(local, like, shape)


def shards_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many parts a tensor is cut into by rows, and which of them this rank holds."""
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                return tensor.device_mesh.size(dimension), tensor.device_mesh.get_local_rank(dimension)
    return 1, 0
