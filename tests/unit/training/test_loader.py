"""What each rank is given of a step, against the stream cut up by hand; and that it is made ahead."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finray.data.sampling.groups import Groups
from finray.data.sampling.order import Order
from finray.data.sampling.packing import PackPlan, one_row_each, plan_packs
from finray.training.loader import EvalLoader, Prefetcher, StepData, StepLoader
from tests.support.examples import examples


class Rows(tuple[int, ...]):
    """Stands for a batch: the rows that it was made of."""

    __slots__ = ()

    def pin_memory(self) -> Any:
        return ("pinned", *self)


def loader(lengths: list[int], plan: PackPlan, *, total: int | None = None, **fields: Any) -> StepLoader:
    split: Any = SimpleNamespace(lengths=np.array(lengths), supervised=np.array(lengths) - 1)
    # Weights of classes are no integers.
    weight = np.array([length * 10 + 0.25 for length in lengths])
    settings = {"global_batch_size": 4, "micro_batch_size": 1, "rank": 0, "world_size": 1, **fields}
    return StepLoader(split, plan, Order(len(plan), seed=5, total=total), collate=Rows, weight=weight, **settings)


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    position=st.integers(0, 60),
    batch=st.integers(1, 9),
    micro=st.integers(1, 4),
    world=st.integers(1, 4),
    apart=st.booleans(),
    lockstep=st.booleans(),
)
def test_a_step_is_cut_into_micro_batches_first_and_then_shared_out(
    lengths: list[int], position: int, batch: int, micro: int, world: int, apart: bool, lockstep: bool
) -> None:
    plan = plan_packs(lengths, 10)
    options = {"global_batch_size": batch, "micro_batch_size": micro, "world_size": world}
    made = loader(lengths, plan, rows_apart=apart, lockstep=lockstep, **options)
    packs = [plan.pack(item) for item in made.order.batch(position, batch)]
    rows = [row for pack in packs for row in pack]
    cut = [packs[at : at + micro] for at in range(0, len(packs), micro)]
    expected: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(world)]
    seen = 0
    for number, some in enumerate(cut):
        own = [row for pack in some for row in pack]
        if apart:
            alike = {lengths[row]: tuple(one for one in own if lengths[one] == lengths[row]) for row in own}
            expected[number % world] += [(seen + at, some) for at, some in enumerate(alike.values())]
        else:
            expected[number % world].append((number, tuple(own)))
        seen += len(own)
    most = max(map(len, expected))
    for rank in range(world):
        data = replace(made, rank=rank).at(position)
        assert data.micro_batches == expected[rank]
        dummy = (rows[0],) if apart else packs[0]
        assert list(data.dummy_batches) == [dummy] * (most - len(expected[rank]) if lockstep else 0)
        # What is known of the whole step is the same on every rank.
        assert (data.samples, data.items) == (tuple(rows), len(packs))
        assert data.tokens == sum(lengths[row] for row in rows)
        assert data.weight == sum(lengths[row] * 10 + 0.25 for row in rows)
        assert data.supervised == sum(lengths[row] - 1 for row in rows)
        assert data.digest == hashlib.sha256(",".join(map(str, rows)).encode()).hexdigest()[:16]


@settings(max_examples=examples(100), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=14),
    batch=st.integers(1, 6),
    micro=st.integers(1, 3),
    joined=st.none() | st.integers(20, 40),
    seed=st.integers(0, 99),
)
def test_a_group_is_never_torn_and_the_same_groups_are_in_a_step_whatever_the_split(
    sizes: list[int], batch: int, micro: int, joined: int | None, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 6, sum(sizes))
    follows = np.array([int(at > 0) for size in sizes for at in range(size)])
    groups = Groups.of(follows)
    plan = one_row_each(groups.sums(lengths), 40).in_rows(groups)
    whole = {row: tuple(range(a, b)) for a, b in zip(groups.starts, groups.starts[1:], strict=False) for row in (a,)}
    assert len(plan) == len(groups) == len(sizes)
    order = Order(len(plan), seed=5).batch(3, batch)
    # Counted in groups, however they are packed.
    expected = sorted(row for group in order for row in whole[int(groups.starts[group])])
    for world in (1, 2, 3):
        options: dict[str, Any] = {"global_batch_size": batch, "micro_batch_size": micro, "world_size": world}
        ranks = [loader(lengths.tolist(), plan, joined=joined, rank=rank, **options).at(3) for rank in range(world)]
        passes = [rows for data in ranks for _, rows in data.micro_batches]
        assert sorted(row for rows in passes for row in rows) == expected
        for rows in passes:
            firsts = [row for row in rows if not follows[row]]
            assert tuple(row for first in firsts for row in whole[first]) == tuple(rows)
            # Packs of `joined` tokens, of which a pass takes `micro`.
            assert joined is None or sum(lengths[list(rows)]) <= joined * micro
        assert {data.items for data in ranks} == {batch}
        assert len({data.samples for data in ranks}) == 1
    # The control: rows that are packed alone are torn.
    if max(sizes) > 1 and joined is None:
        alone = loader(lengths.tolist(), one_row_each(lengths, 40), **{**options, "micro_batch_size": 1, "rank": 0})
        assert any(len(rows) == 1 and whole.get(rows[0]) != rows for _, rows in replace(alone, world_size=1,
                   global_batch_size=len(lengths)).at(0).micro_batches)  # fmt: skip


def test_the_last_step_of_a_stream_is_short() -> None:
    made = loader([1] * 6, one_row_each([1] * 6, 10), total=10)
    assert [made.at(position).items for position in (0, 4, 8)] == [4, 4, 2]


def test_batches_are_pinned_where_that_is_asked_for() -> None:
    made = loader([1] * 3, one_row_each([1] * 3, 10), rank=1, world_size=2, global_batch_size=3, lockstep=True)
    for pin in (True, False):
        data = replace(made, pin=pin).at(0)
        batches: list[Any] = [batch for _, batch in data.micro_batches] + list(data.dummy_batches)
        assert len(batches) == 2
        assert all((batch[0] == "pinned") is pin for batch in batches)


def test_the_rows_that_will_be_read_are_those_of_the_next_epoch_of_steps() -> None:
    lengths = [5, 4, 3, 2, 1, 6]
    made = loader(lengths, plan_packs(lengths, 8))
    epoch = len(made.plan)
    assert 1 < epoch < len(lengths)
    for position in (0, 1, epoch - 1, epoch + 2):
        expected = [
            row for step in range(epoch) for row in replace(made, global_batch_size=1).at(position + step).samples
        ]
        assert list(made.rows_from(position)) == expected


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(("packs", "world"), [(7, 3), (6, 3), (1, 4), (5, 1), (8, 3)])
def test_each_evaluation_row_counts_on_one_rank(packs: int, world: int, lockstep: bool) -> None:
    plan = one_row_each([1] * packs, 4)
    counted: list[int] = []
    passes = []
    for rank in range(world):
        options: dict[str, Any] = {"rank": rank, "world_size": world, "lockstep": lockstep}
        found = list(EvalLoader(plan, Rows, rows=packs, weight=packs, held_out=packs, **options).batches())
        assert [batch for batch, counts in found if counts] == [(row,) for row in range(rank, packs, world)]
        assert all(batch == (0,) for batch, counts in found if not counts)
        counted += [row for batch, counts in found if counts for row in batch]  # type: ignore[attr-defined]
        passes.append(len(found))
    assert sorted(counted) == list(range(packs))
    if lockstep:
        assert set(passes) == {-(-packs // world)}
    else:
        assert sum(passes) == packs


def test_a_step_that_follows_from_the_weights_is_made_when_it_is_taken() -> None:
    asked: list[int] = []

    def make(position: int) -> StepData:
        asked.append(position)
        return StepData([], weight=1, supervised=1, tokens=1, samples=(position,), items=3)

    behind = Prefetcher(make, 6, is_ahead=False)
    for step in range(3):
        assert asked == [6 + 3 * at for at in range(step)]
        assert behind.take(last=step == 2).samples == (6 + 3 * step,)
    behind.close()


def test_the_next_step_is_made_while_this_one_is_taken_and_none_after_the_last() -> None:
    asked: list[int] = []
    made = threading.Semaphore(0)

    def make(position: int) -> StepData:
        asked.append(position)
        made.release()
        return StepData([], weight=1, supervised=1, tokens=1, samples=(position,), items=3)

    times = iter([1.0, 1.5, 10.0, 12.0, 20.0, 20.25])
    ahead = Prefetcher(make, 6, clock=lambda: next(times))
    made.acquire()
    for step in range(3):
        assert ahead.take(last=step == 2).samples == (6 + 3 * step,)
        if step < 2:
            made.acquire()
    assert asked == [6, 9, 12]
    assert ahead.waited == 2.75
    ahead.close()
    assert asked == [6, 9, 12]


def test_an_error_of_the_data_comes_out_where_it_is_taken() -> None:
    def make(position: int) -> StepData:
        raise ValueError("no such row")

    ahead = Prefetcher(make, 0)
    with pytest.raises(ValueError, match="no such row"):
        ahead.take(last=False)
    ahead.close()


def test_a_run_that_ends_does_not_wait_for_data_that_nobody_takes() -> None:
    wanted = threading.Event()
    ahead = Prefetcher(lambda position: wanted.wait(10), 0)  # type: ignore[arg-type, return-value]
    ahead.close()
    assert not ahead._next.done()
    wanted.set()
