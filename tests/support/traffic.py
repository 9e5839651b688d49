"""Counts the bytes that collectives of torch.distributed move, as whole tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Name of the operation to kind, and which argument holds the whole tensors.
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
}


class Traffic(TorchDispatchMode):
    """Bytes by kind of collective; sums of a few numbers in fp64 and of integers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, place = _OPERATIONS.get(func._schema.name.split("::")[1], (func._schema.name, 0))
            self.bytes[kind] += sum(_size(tensor) for tensor in _tensors(args[place]))
        return func(*args, **(kwargs or {}))


def _size(tensor: torch.Tensor) -> int:
    counted = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.numel() > 16
    return tensor.numel() * tensor.element_size() if counted else 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []
