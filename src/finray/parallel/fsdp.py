"""Fully sharded data parallelism (FSDP2): each rank holds a shard of every weight, gradient and moment.

Weights of a block are gathered before it runs and, with ``reshard_after_forward``, freed after it. Gradients are
reduce-scattered during the backward pass of every micro-batch, so no rank ever holds a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from finray.config.resolved import Execution
from finray.config.schema import Config, ParallelConfig
from finray.parallel.base import ProcessGroup


class FSDPStrategy(ProcessGroup):
    """One process of a group that shards the weights; they are gathered in ``precision``."""

    lockstep = True
    shards_weights = True

    def __init__(self, device: torch.device, parallel: ParallelConfig, *, precision: str) -> None:
        super().__init__(device)
        if parallel.cpu_offload:
            self.parameter_device = torch.device("cpu")
        self._parallel = parallel
        self._precision = precision

    @classmethod
    def from_config(cls, config: Config, execution: Execution, device: torch.device) -> FSDPStrategy:
        """Create it from a config."""
        return cls(device, config.parallel, precision=execution.precision)

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """Shard a module, block by block and then the rest."""
        size = self._parallel.shard_size or self.world_size
        # With fewer shards than ranks, several ranks hold the same rows.
        replicas, names = (
            ((), None) if size == self.world_size else ((self.world_size // size,), ("replicate", "shard"))
        )
        policy = MixedPrecisionPolicy()
        if self._precision != "fp32":
            dtype = torch.bfloat16 if self._precision == "bf16" else torch.float16
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        reshard = self._parallel.reshard_after_forward
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (*replicas, size), mesh_dim_names=names),
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy() if self._parallel.cpu_offload else OffloadPolicy(),
        }
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard, **options)
        # In its own group, because gradients of a group are copied into one tensor before they are reduced: for
        # embedding and head together, it would be the largest tensor of a step.
        if (table := _own_table(module, blocks)) is not None:
            fully_shard(table, reshard_after_forward=False, **options)
        fully_shard(module, reshard_after_forward=False, **options)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # The loss is already divided by the targets of the whole step; and gloo cannot scale while it reduces.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)


def _own_table(module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> torch.nn.Embedding | None:
    """The largest embedding outside of the blocks, if it is trained and not tied to another module."""
    inside = {id(part) for block in blocks for part in block.modules()}
    tables = [part for part in module.modules() if isinstance(part, torch.nn.Embedding) and id(part) not in inside]
    table = max(tables, key=lambda part: part.weight.numel(), default=None)
    if table is None or not table.weight.requires_grad:
        return None
    holders = sum(weight is table.weight for _, weight in module.named_parameters(remove_duplicate=False))
    return table if holders == 1 else None
