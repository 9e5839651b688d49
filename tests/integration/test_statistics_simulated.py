"""Intervals that hold the truth as often as they say, and tests that cry wolf no more often: each a thousand times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from finray.evaluation import statistics
from finray.evaluation.scores.base import FloatArray
from finray.evaluation.statistics import interval, paired

pytestmark = pytest.mark.nightly

TRIALS = 1000
# Of each trial; the many trials make up for what a few resamples leave to chance.
DRAWS = 400
Make = Callable[[np.random.Generator, int], FloatArray]


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_RESAMPLES", DRAWS)
    monkeypatch.setattr(statistics, "_SWAPS", DRAWS)


def holds(found: Any, truth: float) -> bool:
    assert None not in (found.low, found.high)
    return bool(found.low <= truth <= found.high)


def mean(sums_K: FloatArray, rows: int) -> float:
    return float(sums_K[0]) / rows


def ratio(sums_K: FloatArray, rows: int) -> float:
    return float(sums_K[0] / sums_K[1])


def many_zeros(draw: np.random.Generator, rows: int) -> FloatArray:
    """As ROUGE of short answers: half of the rows share nothing; the mean is 0.25."""
    return np.where(draw.random((rows, 1)) < 0.5, 0.0, draw.random((rows, 1)))


def skewed(draw: np.random.Generator, rows: int) -> FloatArray:
    return draw.exponential(1.0, (rows, 1))


def per_token(draw: np.random.Generator, rows: int) -> FloatArray:
    """A loss of rows of unequal length; the loss of all tokens is 1."""
    tokens = draw.integers(5, 60, (rows, 1)).astype(float)
    return np.concatenate([tokens * draw.gamma(2, 0.5, (rows, 1)), tokens], axis=1)


@pytest.mark.parametrize(
    ("make", "total", "truth"), [(many_zeros, mean, 0.25), (skewed, mean, 1.0), (per_token, ratio, 1.0)]
)
@pytest.mark.parametrize("rows", [40, 120])
def test_a_bootstrap_interval_holds_the_truth_95_times_in_100(
    make: Make, total: Callable[[FloatArray, int], float], truth: float, rows: int
) -> None:
    draw, held = np.random.default_rng(1), 0
    for trial in range(TRIALS):
        held += holds(interval(make(draw, rows), total, seed=trial), truth)
    assert 0.93 <= held / TRIALS <= 0.97


@pytest.mark.parametrize("rows", [20, 50, 200])
def test_the_interval_of_right_and_wrong_rows_holds_the_truth_95_times_in_100(rows: int) -> None:
    draw, held = np.random.default_rng(2), 0
    for trial in range(TRIALS):
        truth = draw.uniform(0.05, 0.95)
        held += holds(interval((draw.random((rows, 1)) < truth).astype(float), mean, seed=trial), truth)
    assert 0.93 <= held / TRIALS <= 0.97


def right(draw: np.random.Generator, rows: int, gain: float) -> tuple[FloatArray, FloatArray]:
    """Two models that agree on most rows; the second is right on a share ``gain`` more."""
    hard = draw.random((rows, 1))
    flip = draw.random((rows, 1)) < 0.3
    first = hard < 0.4
    second = np.where(flip, draw.random((rows, 1)) < 0.4, first) | (draw.random((rows, 1)) < gain / 0.6)
    return first.astype(float), second.astype(float)


def graded(draw: np.random.Generator, rows: int, gain: float) -> tuple[FloatArray, FloatArray]:
    common = draw.exponential(1.0, (rows, 1))
    return common + draw.exponential(0.5, (rows, 1)), common + draw.exponential(0.5, (rows, 1)) + gain


def losses(draw: np.random.Generator, rows: int, gain: float) -> tuple[FloatArray, FloatArray]:
    """The losses of two models on rows of unequal length, some of which are hard for both; the second's are lower."""
    tokens = draw.integers(5, 60, (rows, 1)).astype(float)
    hard = tokens * draw.gamma(2, 0.5, (rows, 1))
    first, second = (hard * draw.gamma(8, 1 / 8, (rows, 1)) for _ in range(2))
    return np.concatenate([first, tokens], axis=1), np.concatenate([second * (1 - gain), tokens], axis=1)


Pair = Callable[[np.random.Generator, int, float], tuple[FloatArray, FloatArray]]


@pytest.mark.parametrize(
    ("make", "rows", "total"),
    [(right, 40, mean), (right, 200, mean), (graded, 8, mean), (graded, 40, mean), (losses, 40, ratio)],
)
def test_models_that_are_equally_good_differ_at_most_5_times_in_100(
    make: Pair, rows: int, total: Callable[[FloatArray, int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The intervals are not looked at.
    monkeypatch.setattr(statistics, "_RESAMPLES", 2)
    draw = np.random.default_rng(3)
    p = [paired(*make(draw, rows, 0.0), total, seed=trial).p for trial in range(TRIALS)]
    # 0.05 and two standard errors of a thousand trials. McNemar's exact test may stay below.
    assert np.mean(np.array(p) < 0.05) <= 0.064
    if make is not right:
        assert np.mean(np.array(p) < 0.05) >= 0.036
    better = [paired(*make(draw, rows, 0.5), total, seed=trial).p for trial in range(100)]
    assert np.mean(np.array(better) < 0.05) > 0.4, "a test that never speaks would pass, too"


@pytest.mark.parametrize(
    ("make", "rows", "truth", "total"), [(right, 60, 0.0, mean), (graded, 40, 0.3, mean), (losses, 60, -0.2, ratio)]
)
def test_the_interval_of_a_difference_holds_the_truth_95_times_in_100(
    make: Pair, rows: int, truth: float, total: Callable[[FloatArray, int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_SWAPS", 2)
    draw, held = np.random.default_rng(4), 0
    for trial in range(TRIALS):
        held += holds(paired(*make(draw, rows, abs(truth)), total, seed=trial).interval, truth)
    assert 0.93 <= held / TRIALS <= 0.97
