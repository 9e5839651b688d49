"""Intervals that hold the truth as often as they say, and tests that cry wolf no more often: each a thousand times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finray.evaluation import statistics
from finray.evaluation.scores.base import FloatArray
from finray.evaluation.statistics import interval, paired

TRIALS = 1000
# Of each trial; the many trials make up for what a few resamples leave to chance.
DRAWS = 400
Make = Callable[[np.random.Generator, int], FloatArray]


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_RESAMPLES", DRAWS)
    monkeypatch.setattr(statistics, "_SWAPS", DRAWS)


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
        found = interval(make(draw, rows), total, seed=trial)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 0.93 <= held / TRIALS <= 0.97


@pytest.mark.parametrize("rows", [20, 50, 200])
def test_the_interval_of_right_and_wrong_rows_holds_the_truth_95_times_in_100(rows: int) -> None:
    draw, held = np.random.default_rng(2), 0
    for trial in range(TRIALS):
        truth = draw.uniform(0.05, 0.95)
        found = interval((draw.random((rows, 1)) < truth).astype(float), mean, seed=trial)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
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


@pytest.mark.parametrize(("make", "rows"), [(right, 40), (right, 200), (graded, 8), (graded, 40)])
def test_models_that_are_equally_good_differ_at_most_5_times_in_100(
    make: Callable[[np.random.Generator, int, float], tuple[FloatArray, FloatArray]],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The intervals are not looked at.
    monkeypatch.setattr(statistics, "_RESAMPLES", 2)
    draw = np.random.default_rng(3)
    p = [paired(*make(draw, rows, 0.0), mean, seed=trial).p for trial in range(TRIALS)]
    # 0.05 and two standard errors of a thousand trials. McNemar's exact test may stay below.
    assert np.mean(np.array(p) < 0.05) <= 0.064
    if make is graded:
        assert np.mean(np.array(p) < 0.05) >= 0.036
    better = [paired(*make(draw, rows, 0.5), mean, seed=trial).p for trial in range(100)]
    assert np.mean(np.array(better) < 0.05) > 0.4, "a test that never speaks would pass, too"


@pytest.mark.parametrize(("make", "rows", "truth"), [(right, 60, 0.0), (graded, 40, 0.3)])
def test_the_interval_of_a_difference_holds_the_truth_95_times_in_100(
    make: Callable[[np.random.Generator, int, float], tuple[FloatArray, FloatArray]],
    rows: int,
    truth: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "_SWAPS", 2)
    draw, held = np.random.default_rng(4), 0
    for trial in range(TRIALS):
        found = paired(*make(draw, rows, truth), mean, seed=trial).interval
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 0.93 <= held / TRIALS <= 0.97
