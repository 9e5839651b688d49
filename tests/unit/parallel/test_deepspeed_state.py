"""Which elements of the state a rank has of DeepSpeed's vectors, and how it takes them up again: laid out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.errors import CheckpointError
from finray.parallel.base import StatefulOptimizer
from finray.parallel.deepspeed.state import Place, ZeroOptimizer, ZeroWeight, _places
from finray.sharding import FlatShard, store_of

RANK, WORLD = 1, 2
SHAPES = {"absent": (2, 3), "cut": (5,), "rows": (4, 2), "whole": (6,)}
# This rank's elements of each parameter: the vector, the place there, the first of the parameter, and how many.
PLACES = {"absent": (0, 0, 0, 0), "cut": (0, 0, 2, 3), "rows": (0, 3, 1, 4), "whole": (1, 0, 0, 6)}


@pytest.fixture(autouse=True)
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: RANK)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: WORLD)


class Inner(StatefulOptimizer, torch.optim.SGD):
    """The optimizer in DeepSpeed's: a moment of each element, a count, and scales of blocks of two elements."""

    def __init__(self, flats: list[torch.nn.Parameter]) -> None:
        super().__init__([{"params": [flat]} for flat in flats], lr=1.0)
        self.taken: list[tuple[Any, Any, dict[str, list[float]], dict[str, list[float]]]] = []

    def vector_state(self, vector: torch.nn.Parameter) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
        number = len(vector)
        state = {"moment": torch.arange(float(number)) + 100 * number, "step": 7}
        return state, {"absmax1": torch.full((number // 2,), 0.5), "absmax2": torch.full((number // 2,), 0.25)}

    def kinds_to_read(self, name: str, kinds: set[str]) -> set[str]:
        if "other" in kinds:
            raise CheckpointError(f"the state of {name} belongs to a different optimizer")
        return kinds - {"unread"}

    def load_vector_state(
        self,
        vector: torch.nn.Parameter,
        group: dict[str, Any],
        values: dict[str, torch.Tensor],
        blocks: dict[str, torch.Tensor],
    ) -> None:
        plain = [{kind: value.tolist() for kind, value in one.items()} for one in (values, blocks)]
        self.taken.append((vector, group, *plain))


def made(stage: int = 2) -> tuple[ZeroOptimizer, list[torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
    """At stage 2 each vector is a group; at stage 3 both belong to the second group."""
    flats = [torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(6))]
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    groups: list[list[Any]] = [[], []]
    positions = {}
    for name, parameter in parameters.items():
        flat, at, start, count = PLACES[name]
        groups[flat].append(parameter)
        one: Any = parameter
        one._hp_mapping = None
        if count:
            high, low = SimpleNamespace(start=at, numel=count), SimpleNamespace(start=start, numel=count)
            one._hp_mapping = SimpleNamespace(hp_fragment_address=high, lp_fragment_address=low)
        if stage == 3:
            # Ranks have equal shares there, of which the last one is padded.
            share = -(-one.numel() // WORLD)
            one.ds_tensor, one.ds_numel, one.ds_shape = SimpleNamespace(ds_numel=share), one.numel(), one.shape
            one.ds_zero_partition_rank = RANK
            positions[id(one)] = (flat, at, share)
    inner = Inner(flats)
    zero = SimpleNamespace(optimizer=inner)
    if stage == 3:
        zero.fp32_partitioned_groups_flat, zero.fp16_groups = flats, groups
        zero.grad_position, zero.get_param_id = positions, id
        zero.sub_group_to_group_id = {0: 1, 1: 1}
    else:
        zero.single_partition_of_fp32_groups, zero.bit16_groups = flats, groups
    engine = SimpleNamespace(optimizer=zero, zero_optimization_stage=lambda: stage)
    return ZeroOptimizer(engine, parameters), flats, parameters


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a shard its elements, the first, and the shape of the whole; of a number the number."""
    return {
        key: (one.local.tolist(), one.start, tuple(one.shape)) if isinstance(one, FlatShard) else one.tolist()
        for key, one in found.items()
    }


def test_a_rank_has_its_elements_of_each_moment_and_the_scales_of_its_vectors() -> None:
    optimizer, _, parameters = made()
    assert plain(optimizer.sharded_state()) == {
        "absent/moment": ([], 0, (2, 3)),
        "cut/moment": ([800.0, 801.0, 802.0], 2, (5,)),
        "rows/moment": ([803.0, 804.0, 805.0, 806.0], 1, (4, 2)),
        "whole/moment": ([600.0 + at for at in range(6)], 0, (6,)),
        **{f"{name}/step": 7.0 for name in SHAPES},
        # Behind those of rank 0, which has as many.
        "shared/absmax1.zero2-2-0": ([0.5] * 4, 4, (8,)),
        "shared/absmax2.zero2-2-0": ([0.25] * 4, 4, (8,)),
        "shared/absmax1.zero2-2-1": ([0.5] * 3, 3, (6,)),
        "shared/absmax2.zero2-2-1": ([0.25] * 3, 3, (6,)),
    }
    counts = [one for one in optimizer.sharded_state().values() if isinstance(one, torch.Tensor)]
    assert [(one.dtype, one.shape) for one in counts] == [(torch.float32, ())] * 4
    # Weights know their values in the vectors from now on.
    for name, parameter in parameters.items():
        store = store_of(parameter)
        assert isinstance(store, ZeroWeight)
        assert (store.shape, store.dtype) == (SHAPES[name], torch.float32)


class Reader:
    """The state in a checkpoint."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held
        self.shapes = {name: tuple(value.shape) for name, value in held.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.held[name][start:stop] if self.held[name].ndim else self.held[name]


def checkpoint(scales: str) -> dict[str, torch.Tensor]:
    """Every moment counts its elements from forty of its own; kept in half precision."""
    held = {}
    for number, (name, shape) in enumerate(SHAPES.items(), start=1):
        size = torch.Size(shape).numel()
        held[f"{name}/moment"] = (torch.arange(float(size)) + 40 * number).reshape(shape).bfloat16()
        held[f"{name}/step"] = torch.tensor(3.0 + number)
        held[f"{name}/unread"] = torch.zeros(1)
    return {**held, f"shared/{scales}": torch.arange(8.0)}


@pytest.mark.parametrize(
    ("scales", "blocks"),
    [
        ("absmax2.zero2-2-0", [{"absmax2": [4.0, 5.0, 6.0, 7.0]}, {}]),
        ("absmax1.zero2-2-1", [{}, {"absmax1": [4.0, 5.0, 6.0, 7.0]}]),
        # Of another stage, or of another number of ranks.
        ("absmax1.zero1-2-0", [{}, {}]),
        ("absmax1.zero2-4-0", [{}, {}]),
    ],
)
def test_a_rank_takes_up_its_elements_and_the_scales_of_the_same_vectors(
    scales: str, blocks: list[dict[str, list[float]]]
) -> None:
    optimizer, flats, _ = made()
    optimizer.load_sharded_state(Reader(checkpoint(scales)))
    inner: Any = optimizer.inner
    # Elements 2 to 4 of the second, 1 to 4 of the third; then all of the fourth. What is padding stays zero.
    first = [82.0, 83.0, 84.0, 121.0, 122.0, 123.0, 124.0, 0.0]
    assert [one[2:] for one in inner.taken] == [
        ({"moment": first, "step": 6.0}, blocks[0]),
        ({"moment": [160.0 + at for at in range(6)], "step": 7.0}, blocks[1]),
    ]
    for number, (vector, group, _, _) in enumerate(inner.taken):
        assert vector is flats[number]
        assert group is inner.param_groups[number]


def test_under_stage_3_shares_are_equal_and_several_vectors_are_of_one_group() -> None:
    optimizer, flats, parameters = made(stage=3)
    found = _places(optimizer._engine)
    shares = {"absent": (3, 3), "cut": (3, 2), "rows": (4, 4), "whole": (3, 3)}
    for name, (start, count) in shares.items():
        flat, at, *_ = PLACES[name]
        place = found[parameters[name]]
        assert place.flat is flats[flat]
        assert (place.at, place.start, place.count) == (at, start, count)
    assert "shared/absmax1.zero3-2-1" in optimizer.sharded_state()
    optimizer.load_sharded_state(Reader(checkpoint("absmax1.zero3-2-1")))
    inner: Any = optimizer.inner
    assert all(group is inner.param_groups[1] for _, group, _, _ in inner.taken)
    assert [list(one[3]) for one in inner.taken] == [[], ["absmax1"]]


def test_without_moments_nothing_is_taken_up_and_those_of_others_are_refused() -> None:
    optimizer, *_ = made()
    optimizer.load_sharded_state(Reader({"shared/absmax1.zero2-2-0": torch.zeros(8)}))
    inner: Any = optimizer.inner
    assert inner.taken == []
    held = checkpoint("none")
    del held["cut/moment"], held["cut/step"], held["cut/unread"]
    with pytest.raises(CheckpointError, match="belongs to different parameters"):
        optimizer.load_sharded_state(Reader(held))
    with pytest.raises(CheckpointError, match="belongs to a different optimizer"):
        optimizer.load_sharded_state(Reader({**checkpoint("none"), "cut/other": torch.zeros(5)}))


@pytest.mark.parametrize("place", [None, Place(torch.zeros(4), 0, 0, 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_small_weights_that_stay_whole_under_stage_3_are_loaded_whole_too(place: Place | None, rank: int) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(7, 1, dtype=torch.bfloat16))
    weight.ds_shape, weight.ds_numel, weight.ds_zero_partition_rank = (7, 1), 7, rank
    weight.ds_tensor = torch.full((4,), 9.0)
    weight.ds_tensor.ds_numel = 4
    whole = torch.arange(1.0, 8.0).reshape(7, 1)
    ZeroWeight(weight, None).load_local(lambda start, stop: whole[start:stop])
    assert weight.data.flatten().tolist() == whole.flatten().tolist()
    assert weight.ds_tensor.tolist() == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 0.0])[rank]
    assert ZeroWeight(weight, place).dtype == (torch.bfloat16 if place is None else torch.float32)
