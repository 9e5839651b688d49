"""AdamW with 8-bit moments (Dettmers et al. 2022), from bitsandbytes, for weights that may be shards.

Moments are stored as bytes that index a map of 256 values, with a scale for each block of 256 bytes. Blocks are counted
from the first element on a rank. So a checkpoint has a row of scales for each shard; when it is loaded with other
shards, moments are dequantized with the old blocks and quantized with the new ones.
"""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes as bnb
import torch

from finray.errors import CheckpointError
from finray.parallel.base import SHARED, StatefulOptimizer, StateReader
from finray.sharding import is_sharded, local_rows, rows_like, shape_of, shards_of

BLOCK = 256
# Smaller parameters keep fp32 moments, as bitsandbytes advises; total size over all ranks.
SMALLEST = 4096
_BITS = "bits"


class AdamW8bit(StatefulOptimizer, bnb.optim.AdamW8bit):  # type: ignore[misc]
    """AdamW with 8-bit moments.

    Args:
        groups: parameter groups; parameters may be shards.
        paged: keep the moments in unified memory, which the driver moves to the CPU when the GPU is full.
        lr, betas, eps: as for Adam.
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, paged: bool, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._local: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._updates = 0
        held_groups = []
        on_cpu = True
        for group in groups:
            for bits in (8, 32):
                fitting = [parameter for parameter in group["params"] if _is_eight(parameter) == (bits == 8)]
                on_cpu &= all(parameter.device.type == "cpu" for parameter in fitting)
                for parameter in fitting:
                    # This rank's shard shares its memory.
                    shard = (
                        torch.nn.Parameter(local_rows(parameter.detach())[0], parameter.requires_grad)
                        if is_sharded(parameter)
                        else parameter
                    )
                    self._local[parameter] = shard
                held = [self._local[parameter] for parameter in fitting]
                # A rank may have no row of a small parameter; if a library holds the values, all are empty.
                if held := [parameter for parameter in held if parameter.numel() or parameter in self._local]:
                    held_groups.append({**group, "params": held, _BITS: bits})
        super().__init__(held_groups, lr=lr, betas=betas, eps=eps, min_8bit_size=0, is_paged=paged and not on_cpu)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Called by bitsandbytes for the settings of a parameter."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group[_BITS]
        return config

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update. bitsandbytes synchronizes after each parameter anyway, so reading a number here costs nothing."""
        assert closure is None
        if self.found_inf is not None and bool(self.found_inf):
            return
        for parameter, local in self._local.items():
            local.grad = None if parameter.grad is None else local_rows(parameter.grad)[0]
        self._updates += 1
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        super().zero_grad(set_to_none)
        for parameter in self._local:
            parameter.grad = None

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter as tensors that are sharded by rows like the parameter."""
        local = self._local[parameter]
        state = self.state.get(local, {})
        if not self._updates:
            return {}
        parts, _ = shards_of(parameter)
        # Number of blocks of the largest shard.
        rows = -(-parameter.shape[0] // parts)
        blocks = -(-rows * (parameter.numel() // parameter.shape[0]) // BLOCK)
        # A rank without rows of this parameter has no state of it, but may be the one that writes the count.
        moments = {"step": torch.tensor(float(self._updates))}
        eight = _is_eight(parameter)
        for number in ("1", "2"):
            values = state.get(f"state{number}")
            if values is None:
                values = torch.zeros_like(local, dtype=torch.uint8 if eight else torch.float32)
            moments[f"state{number}"] = rows_like(values, parameter, tuple(parameter.shape))
            if eight:
                scales = local.new_zeros((1, blocks), dtype=torch.float32)
                if f"absmax{number}" in state:
                    scales[0, : len(state[f"absmax{number}"])] = state[f"absmax{number}"]
                moments[f"absmax{number}"] = rows_like(scales, parameter, (parts, blocks))
        return moments

    def shared_state(self) -> dict[str, torch.Tensor]:
        """The quantization maps of the first and the second moment."""
        return {"qmap1": self.name2qmap["dynamic"], "qmap2": self.name2qmap["udynamic"]}

    def load_state_of(self, parameter: torch.nn.Parameter, name: str, kinds: set[str], reader: StateReader) -> None:
        """Load the state from :meth:`state_of`, with the same shards or others."""
        self.kinds_to_read(name, kinds)
        local = self._local[parameter]
        self._updates = int(reader.read(f"{name}/step"))
        if not local.numel():
            return
        places = [(group, place) for group, one in enumerate(self.param_groups) for place in range(len(one["params"]))]
        group, at = next(one for one in places if self.param_groups[one[0]]["params"][one[1]] is local)
        self.init_state(self.param_groups[group], local, group, at)
        state = self.state[local]
        state["step"] = self._updates
        parts, part = shards_of(parameter)
        _, start = local_rows(parameter)
        stop = start + len(local)
        for number in ("1", "2"):
            scales = f"{name}/absmax{number}"
            if scales in reader.shapes and reader.shapes[scales][0] == parts:
                state[f"state{number}"].copy_(reader.read(f"{name}/state{number}", start, stop))
                own = state[f"absmax{number}"]
                own.copy_(reader.read(scales, part, part + 1)[0, : len(own)])
            else:
                _store(state, number, self.rows(reader, name, f"state{number}", start, stop))

    def vector_state(self, vector: torch.nn.Parameter) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The state of a flat vector into which a library joined parameters, in fp32, and the scales of its blocks."""
        state = self.state.get(vector, {})
        values: dict[str, torch.Tensor] = {}
        scales: dict[str, torch.Tensor] = {}
        if not state:
            return values, scales
        for number in ("1", "2"):
            kept = state[f"state{number}"]
            if kept.dtype == torch.uint8:
                scales[f"absmax{number}"] = state[f"absmax{number}"]
                kept = unpack(kept, state[f"absmax{number}"], state[f"qmap{number}"])
            values[f"state{number}"] = kept
        return {**values, "step": torch.tensor(float(state["step"]))}, scales

    def load_vector_state(
        self,
        vector: torch.nn.Parameter,
        group: dict[str, Any],
        values: dict[str, torch.Tensor],
        blocks: dict[str, torch.Tensor],
    ) -> None:
        """Load the state from :meth:`vector_state`; without scales, keep those of the current blocks."""
        # bitsandbytes looks settings up by index, and DeepSpeed takes the vectors out of their groups.
        groups = self.param_groups
        self.param_groups: list[dict[str, Any]] = [{**group, "params": [vector]}]
        self.init_state(self.param_groups[0], vector, 0, 0)
        self.param_groups = groups
        state = self.state[vector]
        state["step"] = self._updates = int(values["step"])
        for number in ("1", "2"):
            _store(state, number, values[f"state{number}"], blocks.get(f"absmax{number}"))

    def kinds_to_read(self, name: str, kinds: set[str]) -> set[str]:
        """Both moments and the count; scales are read together with the moments."""
        if "state1" not in kinds:
            raise CheckpointError(f"the state of {name} belongs to a different optimizer")
        return {"step", "state1", "state2"}

    def rows(self, reader: StateReader, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a moment in fp32, for any sharding and format in the checkpoint."""
        key, scales_key = f"{name}/{kind}", f"{name}/absmax{kind[-1]}"
        if scales_key not in reader.shapes:
            return reader.read(key, start, stop)
        whole, parts = reader.shapes[key][0], reader.shapes[scales_key][0]
        rows = -(-whole // parts)
        quantization = reader.read(f"{SHARED}/qmap{kind[-1]}")
        blocks = []
        for part in range(start // rows, -(-stop // rows)):
            first, last = part * rows, min((part + 1) * rows, whole)
            values = unpack(reader.read(key, first, last), reader.read(scales_key, part, part + 1)[0], quantization)
            blocks.append(values[max(start, first) - first : min(stop, last) - first])
        return torch.cat(blocks)


def _is_eight(parameter: torch.Tensor) -> bool:
    return math.prod(shape_of(parameter)) >= SMALLEST


def _store(state: dict[str, Any], number: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Copy a moment (fp32) into the state of a parameter, which may be 8-bit."""
    kept = state[f"state{number}"]
    if kept.dtype == torch.uint8:
        values, absmax = pack(values.cpu(), state[f"qmap{number}"].cpu(), scales)
        state[f"absmax{number}"].copy_(absmax)
    kept.copy_(values)


def unpack(packed: torch.Tensor, scales: torch.Tensor, quantization: torch.Tensor) -> torch.Tensor:
    """Dequantize bytes that index a map, with a scale for each block, to fp32."""
    flat = quantization[packed.reshape(-1).long()]
    return (flat * scales.repeat_interleave(BLOCK)[: flat.numel()]).view(packed.shape)


def pack(
    values: torch.Tensor, quantization: torch.Tensor, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to the nearest entries of an ascending map; returns the bytes and the scale of each block.

    Scales default to the largest absolute value of each block.
    """
    flat = values.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1) if scales is None else scales
    scaled = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).reshape(-1)[: len(flat)]
    between = (quantization[1:] + quantization[:-1]) / 2
    return torch.bucketize(scaled, between).to(torch.uint8).view(values.shape), scales
