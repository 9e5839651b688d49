"""The order is a pure function, and a permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray.config.resolved import Steps
from finray.data.sampling.order import Order, derive_key, mix, permutation, total_steps


def reference_splitmix(value: int) -> int:
    """SplitMix64's next() on Python integers."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mix_is_splitmix64(values: list[int]) -> None:
    assert mix(np.array(values, dtype=np.uint64)).tolist() == [reference_splitmix(value) for value in values]


def test_order_is_pinned() -> None:
    """Changing these numbers changes what every existing run would see on resume."""
    assert derive_key("epoch", 17, 0) == 0xFDB21586176E4206
    assert permutation(8, "epoch", 17, 0).tolist() == [7, 5, 0, 4, 1, 3, 2, 6]
    assert permutation(8, "epoch", 17, 1).tolist() == [1, 4, 5, 3, 6, 0, 2, 7]


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 3))
def test_every_epoch_holds_every_item_once(count: int, seed: int, epoch: int) -> None:
    order = Order(count, seed=seed)
    assert sorted(order.batch(epoch * count, count)) == list(range(count))


def test_the_last_step_is_short_and_nothing_is_seen_twice() -> None:
    steps, total = total_steps(10, Steps(4, 1.0), max_steps=None)
    order = Order(10, seed=0, total=total)
    batches = [order.batch(step * 4, 4) for step in range(steps)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(item for batch in batches for item in batch) == list(range(10))


def test_other_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(permutation(20, "epoch", seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_an_order_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        Order(0, seed=1)
    assert Order(1, seed=1).batch(0, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [
        (1.0, None, (3, 10)),
        (2.5, None, (7, 25)),
        (0.01, None, (1, 1)),
        (0.25, None, (1, 2)),
        (1.2, None, (3, 12)),
        (3.0, 5, (5, None)),
    ],
)
def test_the_steps_of_a_run_by_epochs_or_by_number(
    epochs: float, max_steps: int | None, expected: tuple[int, int | None]
) -> None:
    assert total_steps(10, Steps(4, epochs), max_steps=max_steps) == expected
