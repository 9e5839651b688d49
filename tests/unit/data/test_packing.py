"""Packs hold every row once, never overflow, and are nearly full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray.data.sampling.packing import equal_length_batches, one_row_each, plan_packs


@given(st.lists(st.integers(1, 50), max_size=80))
def test_every_row_is_packed_once_and_no_pack_overflows(lengths: list[int]) -> None:
    plan = plan_packs(lengths, 50)
    packs = [plan.pack(index) for index in range(len(plan))]
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= 50 for pack in packs)
    assert plan.tokens == sum(lengths)


def packs_by_hand(lengths: list[int], capacity: int) -> list[tuple[int, ...]]:
    """As docs/formats.md says: from the longest row, ties by number, into the pack with the least sufficient space; of
    several, into the one that reached it last."""
    packs: list[list[int]] = []
    left: list[tuple[int, int]] = []
    for at, row in enumerate(sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))):
        fitting = [(room, -reached, pack) for pack, (room, reached) in enumerate(left) if room >= lengths[row]]
        room, _, pack = min(fitting, default=(capacity, 0, len(packs)))
        if pack == len(packs):
            packs.append([])
            left.append((0, 0))
        packs[pack].append(row)
        left[pack] = (room - lengths[row], at)
    return [tuple(pack) for pack in packs]


# Few lengths, so that many rows and packs are alike.
@given(st.lists(st.integers(1, 9), max_size=80), st.sampled_from([9, 12, 30]))
def test_rows_and_packs_are_numbered_as_the_formats_say(lengths: list[int], capacity: int) -> None:
    plan = plan_packs(lengths, capacity)
    assert [plan.pack(index) for index in range(len(plan))] == packs_by_hand(lengths, capacity)


def test_ten_thousand_documents_fill_their_packs() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 10_000).astype(int), 4, 2048)
    assert plan_packs(lengths, 2048).fill > 0.98


def test_a_row_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="51 tokens"):
        plan_packs([3, 51], 50)


def test_without_packing_every_row_stands_alone() -> None:
    plan = one_row_each([5, 3, 9], 10)
    assert [plan.pack(index) for index in range(len(plan))] == [(0,), (1,), (2,)]
    assert (plan.tokens, plan.capacity, plan.fill) == (17, 10, 17 / 30)
    assert (len(plan_packs([], 10)), plan_packs([], 10).fill, plan_packs([4, 5], 10).fill) == (0, 0.0, 0.9)


def test_rows_of_one_length_share_packs_as_far_as_they_fit() -> None:
    plan = equal_length_batches([5, 3, 5, 9, 3, 5, 12, 3], 10)
    assert [plan.pack(index) for index in range(len(plan))] == [(1, 4, 7), (0, 2), (5,), (3,), (6,)]
    assert (plan.tokens, len(equal_length_batches([], 10))) == (45, 0)
