"""Tensors that may be sharded: the rows that this rank holds, the whole of them, and filling them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows of a tensor that this rank holds, and the number of the first; all rows of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: torch.Tensor = tensor.to_local()
    return local, offset[0] if offset else 0


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different rows."""
    return isinstance(tensor, DTensor)


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same rows (hybrid sharding has several)."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or [])
    return all(at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor, on every rank; a collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: torch.Tensor = tensor.full_tensor()
    return full


@torch.no_grad()
def fill(tensor: torch.Tensor, read: Callable[[int, int], torch.Tensor]) -> None:
    """Copy rows into a tensor: those that this rank holds, from a function of first row and the one after the last."""
    local, start = local_rows(tensor)
    if local.ndim == 0:
        local.copy_(read(0, 1))
    elif len(local):
        local.copy_(read(start, start + len(local)))
