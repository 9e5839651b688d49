"""Weights and optimizer state in DeepSpeed's layout: flattened, and split without regard to rows.

DeepSpeed joins the parameters of a group into one vector and gives each rank a slice of it, so a rank holds an
arbitrary range of elements of a parameter. They are read and written here without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from finray import compat
from finray.parallel.base import SHARED, StateReader, kinds_of_state, stateful
from finray.sharding import FlatShard, Read, attach_store, read_elements

# Per-block state of a vector: the scales of 8-bit moments.
BLOCK_KINDS = ("absmax1", "absmax2")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of this rank's elements of a parameter."""

    flat: torch.Tensor  # the optimizer's vector (fp32) that holds them
    at: int  # their first position in it
    start: int  # the first element of the parameter
    count: int  # how many; possibly none

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a vector with the same layout as ``flat``."""
        return vector.narrow(0, self.at, self.count)


class ZeroWeight:
    """A weight that DeepSpeed shards.

    Under stage 3 each rank holds an equal share of its elements, the last one padded. Under stages 1 and 2 it is whole
    on every rank. A trained one (with a place) has fp32 values in the optimizers of the ranks that hold its elements.
    """

    def __init__(self, parameter: Any, place: Place | None = None) -> None:
        self._parameter = parameter
        self._place = place
        self.shape = _whole_shape(parameter)
        self.dtype: torch.dtype = parameter.dtype if place is None else torch.float32

    def load_local(self, read: Read) -> None:
        """Load this rank's shard."""
        weight, place = self._parameter, self._place
        share = getattr(weight, "ds_tensor", None)
        if share is not None:
            start, count = _share(weight)
            values = read_elements(read, self.shape, start, start + count)
            share.zero_()
            share.narrow(0, 0, count).copy_(values)
            if place is not None:
                place.of(place.flat.data).copy_(values)
        # Under stage 3, small parameters stay whole on every rank during training.
        if share is None or weight.numel() == weight.ds_numel:
            whole = read(0, self.shape[0] if self.shape else 1)
            weight.data.copy_(whole.reshape(self.shape))
            if share is None and place is not None:
                place.of(place.flat.data).copy_(whole.reshape(-1)[place.start : place.start + place.count])

    def full_tensor(self) -> torch.Tensor:
        """The full tensor; in fp32 if it is trained."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if self._place is not None:
            full: torch.Tensor = safe_get_full_fp32_param(self._parameter)
            return full
        with GatheredParameters([self._parameter]):
            frozen: torch.Tensor = self._parameter.data.clone()
        return frozen


class ZeroOptimizer:
    """The optimizer inside DeepSpeed's, as the loop sees it. It knows where the fp32 values of trained weights are.

    Args:
        engine: DeepSpeed's.
        parameters: the trainable ones, by name.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._engine = engine
        self._stage = engine.zero_optimization_stage()
        self._places = _places(engine)
        assert self._places.keys() == set(self.parameters.values())
        for parameter, place in self._places.items():
            attach_store(parameter, ZeroWeight(parameter, place))
        # The wrapped optimizer: over vectors instead of parameters.
        self.inner = engine.optimizer.optimizer
        self._state = stateful(self.inner)

    def step(self, learning_rate: float, *, found_inf: torch.Tensor | None = None) -> None:
        """Clip, update, and distribute the new weights to all ranks; gradients are freed.

        DeepSpeed synchronizes in every step, so reading ``found_inf`` costs nothing.
        """
        zero = self._engine.optimizer
        for group in zero.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        left_out = found_inf is not None and bool(found_inf)
        if left_out:
            # DeepSpeed still does the rest of a step: it clears the gradients.
            self.inner.step = lambda closure=None: None
        try:
            self._engine.step()
        finally:
            if left_out:
                del self.inner.step
                # With stage 2 and CPU offload it would add to the overflowed gradients forever.
                zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients) if self._stage < 3 else {}
            # Otherwise it would scale the next loss, which is already scaled.
            zero.loss_scaler.cur_scale = 1.0

    def sharded_state(self) -> dict[str, torch.Tensor | FlatShard]:
        """This rank's elements of the moments, and the update counts, as ``<parameter>/<kind>``."""
        state: dict[str, torch.Tensor | FlatShard] = {}
        held: dict[torch.Tensor, Mapping[str, Any]] = {}
        for number, flat in enumerate(_flats(self._engine)):
            held[flat], blocks = self._state.vector_state(flat)
            for kind, share in blocks.items():
                whole = (dist.get_world_size() * len(share),)
                state[self._block_key(kind, number)] = FlatShard(share, dist.get_rank() * len(share), whole)
        for name, parameter in self.parameters.items():
            place = self._places[parameter]
            shape = _whole_shape(parameter)
            for kind, value in held[place.flat].items():
                if torch.is_tensor(value) and value.shape == place.flat.shape:
                    state[f"{name}/{kind}"] = FlatShard(place.of(value), place.start, shape)
                else:
                    state[f"{name}/{kind}"] = torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()
        return state

    @torch.no_grad()
    def load_sharded_state(self, reader: StateReader) -> None:
        """Restore the state from :meth:`sharded_state`, written under any strategy.
        Raises CheckpointError: the state belongs to other parameters, or to another optimizer."""
        kinds = kinds_of_state(reader, self.parameters)
        if not kinds:
            return
        zero = self._engine.optimizer
        for number, flat in enumerate(_flats(self._engine)):
            values: dict[str, torch.Tensor] = {}
            for name, parameter in self.parameters.items():
                place = self._places[parameter]
                if place.flat is not flat:
                    continue
                for kind in self._state.kinds_to_read(name, kinds[name]):
                    shape = reader.shapes[f"{name}/{kind}"]
                    if not shape:
                        values[kind] = reader.read(f"{name}/{kind}").reshape(())
                        continue
                    if kind not in values:
                        values[kind] = torch.zeros_like(flat, dtype=torch.float32)
                    rows = partial(self._state.rows, reader, name, kind)
                    share = read_elements(rows, shape, place.start, place.start + place.count)
                    place.of(values[kind]).copy_(share)
            blocks = {}
            for kind in BLOCK_KINDS:
                key = self._block_key(kind, number)
                if key in reader.shapes:
                    each, rank = reader.shapes[key][0] // dist.get_world_size(), dist.get_rank()
                    blocks[kind] = reader.read(key, rank * each, (rank + 1) * each)
            # Under stage 3 a group of parameters may be several vectors.
            index = zero.sub_group_to_group_id[number] if self._stage == 3 else number
            self._state.load_vector_state(flat, self.inner.param_groups[index], values, blocks)

    def _block_key(self, kind: str, number: int) -> str:
        """Identifies a vector and how it was split: its blocks are only valid for the same split."""
        return f"{SHARED}/{kind}.zero{self._stage}-{dist.get_world_size()}-{number}"


def _flats(engine: Any) -> list[torch.nn.Parameter]:
    """The flat vectors of this rank's optimizer."""
    zero = engine.optimizer
    stage_3 = engine.zero_optimization_stage() == 3
    return list(zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups)


def _places(engine: Any) -> dict[torch.nn.Parameter, Place]:
    """Location of this rank's elements of every trained parameter."""
    zero = engine.optimizer
    places: dict[torch.nn.Parameter, Place] = {}
    if engine.zero_optimization_stage() == 3:
        for flat, group in zip(_flats(engine), zero.fp16_groups, strict=True):
            for parameter in group:
                _, at, _ = zero.grad_position[zero.get_param_id(parameter)]
                places[parameter] = Place(flat, at, *_share(parameter))
        return places
    for flat, group in zip(_flats(engine), zero.bit16_groups, strict=True):
        for parameter in group:
            fragment = compat.zero_fragment(parameter)
            if fragment is None:
                places[parameter] = Place(flat, 0, 0, 0)
            else:
                at, start = fragment.hp_fragment_address, fragment.lp_fragment_address
                places[parameter] = Place(flat, at.start, start.start, start.numel)
    return places


def _share(parameter: Any) -> tuple[int, int]:
    """First element and number of elements of this rank's share of a weight under stage 3."""
    size = parameter.ds_tensor.ds_numel
    start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def _whole_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
