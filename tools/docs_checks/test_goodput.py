"""The formulas of goodput beside simulated runs."""

from __future__ import annotations

import random
from itertools import pairwise
from math import exp

import pytest
from tools.goodput import GPU_HOURS, best_interval, goodput, keepings


def simulated(
    interval: float, cost: float, restart: float, mtbf: float, *, seed: int, intervals: int = 40_000
) -> float:
    """Share of the time in which a run goes forward, minute by minute as it happens."""
    draw = random.Random(seed)
    now, fails = 0.0, draw.expovariate(1 / mtbf)
    for _ in range(intervals):
        # The same stretch again and again until it comes to its checkpoint; a restart may fail like anything else.
        while now + interval + cost > fails:
            now = fails
            fails = now + draw.expovariate(1 / mtbf)
            while now + restart > fails:
                now = fails
                fails = now + draw.expovariate(1 / mtbf)
            now += restart
        now += interval + cost
    return intervals * interval / now


@pytest.mark.parametrize(
    ("interval", "cost", "restart", "mtbf"),
    [(600.0, 1.0, 150.0, 36_000.0), (85.0, 1.0, 150.0, 3600.0), (1800.0, 60.0, 300.0, 3600.0), (60.0, 5.0, 0.0, 600.0)],
)
def test_goodput_is_what_a_simulated_run_has(interval: float, cost: float, restart: float, mtbf: float) -> None:
    expected = goodput(interval, cost, restart, mtbf)
    assert simulated(interval, cost, restart, mtbf, seed=3) == pytest.approx(expected, rel=0.01)
    # Negative control: without what is computed twice it would be more than that.
    naive = interval / (interval + cost) * exp(-restart / mtbf)
    assert naive > 1.005 * expected


def test_no_interval_is_much_better_than_youngs() -> None:
    for cost, mtbf in ((1.0, 180_000.0), (5.0, 36_000.0), (1.0, 3600.0)):
        best = best_interval(cost, mtbf)
        found = goodput(best, cost, 100.0, mtbf)
        others = [goodput(best * factor, cost, 100.0, mtbf) for factor in (0.2, 0.5, 0.8, 1.25, 2.0, 5.0)]
        assert max(others) < found * 1.001
        # Negative control: far from it is worse.
        assert min(others) < found * 0.999


def test_more_failures_leave_less_and_memory_leaves_more() -> None:
    assert 49 < GPU_HOURS / 1024 < 50
    shares = [[one.at(hours * 3600.0)[1] for one in keepings()] for hours in (50, 10, 1)]
    for rarely, often in pairwise(shares):
        assert all(more > less for more, less in zip(rarely, often, strict=True))
    for hourly, best, memory in shares:
        assert hourly < best < memory < 1
