"""Intervals, tests and the sentence: against SciPy and by hand. That they hold is simulated in tests/integration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from finray.evaluation import statistics as module
from finray.evaluation.scores.base import FloatArray
from finray.evaluation.statistics import (
    Interval,
    Paired,
    adjusted,
    auroc_interval,
    auroc_rows,
    interval,
    paired,
    sentence,
    spearman_interval,
)


def mean(sums_K: FloatArray, rows: int) -> float:
    return float(sums_K[0]) / rows


def ratio(sums_K: FloatArray, rows: int) -> float:
    return float(sums_K[0] / sums_K[1])


def right(count: int, rows: int) -> FloatArray:
    return (np.arange(rows) < count).astype(float)[:, None]


@pytest.mark.parametrize(("count", "rows"), [(0, 10), (10, 10), (1, 1), (3, 7), (77, 200)])
def test_right_or_wrong_rows_have_wilsons_interval(count: int, rows: int) -> None:
    """By its formula."""
    z, share = stats.norm.ppf(0.975), count / rows
    centre = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
    reach = z / (1 + z**2 / rows) * np.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    found = interval(right(count, rows), mean)
    assert (found.low, found.high) == (pytest.approx(max(centre - reach, 0), abs=1e-9), pytest.approx(centre + reach))
    assert found.method == "Wilson"
    assert found.low != found.high


@pytest.mark.parametrize("rows", [60, 400])
def test_the_bootstrap_is_near_scipys_bca(rows: int) -> None:
    values = np.random.default_rng(0).exponential(1.0, rows)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=5000, method="BCa", rng=np.random.default_rng(1))
    found = interval(values[:, None], mean)
    # For few rows the ends are further out.
    slack = 0.06 if rows == 60 else 0.03
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=slack)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=slack)
    assert interval(values[:, None], mean) == found
    assert interval(values[:, None], mean, seed=1) != found


def test_the_end_on_the_side_of_few_large_values_is_scipys() -> None:
    """That is what the acceleration of BCa is for."""
    values = np.random.default_rng(0).lognormal(0, 1.5, 400)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=5000, method="BCa", rng=np.random.default_rng(1))
    assert interval(values[:, None], mean).high == pytest.approx(theirs.confidence_interval.high, abs=0.1)


def test_right_or_wrong_pairs_have_mcnemars_exact_test() -> None:
    first, second = right(8, 40), np.roll(right(18, 40), 3, axis=0)
    gained, lost = 13, 3
    found = paired(first, second, mean)
    assert (found.gained, found.lost) == (gained, lost)
    assert found.difference == pytest.approx(0.25)
    assert found.p == pytest.approx(2 * stats.binom.cdf(lost, gained + lost, 0.5))
    centre = 10 / 42
    reach = 1.959964 * np.sqrt(17 - 100 / 42) / 42
    assert found.interval.low == pytest.approx(centre - reach, rel=1e-5)
    assert found.interval.high == pytest.approx(centre + reach, rel=1e-5)


def test_models_that_agree_on_every_row_have_a_p_of_one() -> None:
    assert paired(right(4, 9), right(4, 9), mean).p == 1.0
    graded = np.linspace(0, 1, 9)[:, None]
    assert paired(graded, graded, mean).p == 1.0


@pytest.mark.parametrize("rows", [7, 12])
def test_few_graded_rows_are_swapped_in_every_way_there_is(rows: int) -> None:
    draw = np.random.default_rng(2)
    first, second = draw.random((rows, 2)) + 0.5, draw.random((rows, 2)) + 0.6
    observed = abs(ratio(second.sum(0), rows) - ratio(first.sum(0), rows))
    extreme = 0
    for swap in product([False, True], repeat=rows):
        one = np.where(np.array(swap)[:, None], second, first).sum(0)
        other = np.where(np.array(swap)[:, None], first, second).sum(0)
        extreme += abs(ratio(other, rows) - ratio(one, rows)) >= observed - 1e-12
    assert paired(first, second, ratio).p == pytest.approx(extreme / 2**rows)


def test_p_values_of_several_comparisons_are_holms() -> None:
    assert adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted([0.5, 0.9]) == [1.0, 1.0]
    assert adjusted([0.9, 0.6]) == [1.0, 1.0]
    assert adjusted([0.02]) == [0.02]


def said(difference: float, low: float, high: float, p: float, rows: int = 200, *, lower: bool = False) -> str:
    found = Paired(difference, Interval(low, high, "x"), p, "y")
    return sentence(
        found,
        name="tuned",
        other="base",
        score="accuracy",
        rows=rows,
        shown=lambda value: f"{value:.2f}",
        higher_is_better=not lower,
    )


def test_the_sentence_says_no_more_than_the_numbers() -> None:
    assert said(0.1, 0.03, 0.17, 0.004).startswith("tuned is better than base on accuracy: by 0.10")
    assert said(-0.1, -0.17, -0.03, 0.004).startswith("tuned is worse than base on accuracy: by 0.10")
    assert said(-0.1, -0.17, -0.03, 0.004, lower=True).startswith("tuned is better than base")
    # The test and the interval must both speak.
    for found in (said(0.1, 0.03, 0.17, 0.06), said(0.1, -0.01, 0.2, 0.04)):
        assert found.startswith("tuned and base cannot be told apart on accuracy from 200 rows")
        assert "better" not in found
    assert "+0.03 to +0.17, p = 0.004, 200 rows" in said(0.1, 0.03, 0.17, 0.004)
    assert "-0.01 to +0.20" in said(0.1, -0.01, 0.2, 0.4)
    assert said(0.1, 0.03, 0.17, 0.0009) == (
        "tuned is better than base on accuracy: by 0.10 "
        "(95 % interval of the gain +0.03 to +0.17, p < 0.001, 200 rows)."
    )
    assert "p = 0.001, " in said(0.1, 0.03, 0.17, 0.001)
    assert "(95 % interval of the gain +0.03 to +0.17, p" in said(-0.1, -0.17, -0.03, 0.004, lower=True)
    # At the borders, and where the difference itself is none.
    for found in (said(0.1, 0.03, 0.17, 0.051), said(0.1, 0.0, 0.17, 0.001), said(0.0, 0.03, 0.17, 0.001)):
        assert "cannot be told apart on accuracy from 200 rows: the difference of " in found
        assert "may be chance (95 % interval of the gain +0.0" in found
    assert "is better" in said(0.1, 0.03, 0.17, 0.0499)
    assert "these rows only" in said(0.5, 0.2, 0.7, 0.01, rows=29)
    assert "these rows only" in said(0.5, 0.2, 0.7, 0.01, rows=12)
    assert "these rows only" not in said(0.5, 0.2, 0.7, 0.01, rows=30)


@pytest.mark.parametrize(
    ("difference", "p", "higher_is_better", "said"),
    [
        (0.1, 0.4, True, "a and b cannot be told apart on s: 9 rows show no spread to judge by."),
        (0.0, 0.001, True, "a and b cannot be told apart on s: 9 rows show no spread to judge by."),
        # All rows differ by the same.
        (1.0, 0.0002, True, "a is better than b on s: by 1.0 (p < 0.001, 9 rows without any spread)."),
        (1.0, 0.004, False, "a is worse than b on s: by 1.0 (p = 0.004, 9 rows without any spread)."),
    ],
)
def test_of_rows_without_spread_the_test_alone_can_speak(
    difference: float, p: float, higher_is_better: bool, said: str
) -> None:
    found = Paired(difference, Interval(None, None, "none"), p, "y")
    text = sentence(found, name="a", other="b", score="s", rows=9, shown=str, higher_is_better=higher_is_better)
    assert text == said


@pytest.mark.parametrize("seed", [0, 3])
def test_the_permutation_test_by_its_formula(seed: int) -> None:
    """4000 random swaps, and the observed one (Phipson and Smyth 2010)."""
    draw = np.random.default_rng(5)
    first, second = draw.random(13), draw.random(13) + 0.2
    signs = np.random.default_rng([seed, 2]).choice([-1.0, 1.0], size=(4000, 13))
    swapped = np.abs((signs * (second - first)).mean(1))
    extreme = int((swapped >= abs((second - first).mean()) - 1e-12).sum())
    assert 0 < extreme < 1000
    assert paired(first[:, None], second[:, None], mean, seed=seed).p == (extreme + 1) / 4001


def test_resamples_and_swaps_are_the_same_however_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random((30, 1))
    found = []
    for held in (1, 30, 7 * 30, 2**22):
        monkeypatch.setattr(module, "_HELD", held)
        found.append((interval(values, mean), paired(values, values[::-1] ** 2, mean)))
    assert found[0] == found[1] == found[2] == found[3]


def test_two_graded_rows_have_an_interval_and_one_has_none() -> None:
    first, second = np.array([[0.2], [0.4]]), np.array([[0.5], [0.3]])
    assert paired(first, second, mean).interval.low is not None
    alone = paired(first[:1], second[:1], mean)
    assert (alone.interval.method, alone.p) == ("none: one row has no spread", 1.0)
    for values, why in (([], "one row has no spread"), ([0.4], "one row has"), ([0.4] * 9, "all rows have the same")):
        without = interval(np.array(values).reshape(-1, 1), mean)
        assert (without.low, without.high, why in without.method) == (None, None, True)
    assert interval(first, mean).low is not None


@pytest.mark.parametrize("rows", [10_000, 10_001, 200_000])
def test_many_rows_are_taken_in_groups_with_the_interval_and_the_p_of_the_normal_distribution(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group has a number of rows of its own, so of a score far from 0 as well. Of as many groups at most is drawn."""
    drawn: list[int] = []
    resampled = module._resampled_sums
    monkeypatch.setattr(module, "_resampled_sums", lambda sums, seed: drawn.append(len(sums)) or resampled(sums, seed))
    random = np.random.default_rng(3)
    values = 100 + np.sort(random.exponential(1.0, rows))
    error = values.std(ddof=1) / np.sqrt(rows)
    found = interval(values[:, None], mean)
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)
    moved = random.normal(size=rows)
    moved += 1.5 * moved.std() / np.sqrt(rows) - moved.mean()
    apart = paired(values[:, None], (values + moved)[:, None], mean)
    assert apart.p == pytest.approx(2 * stats.norm.sf(1.5), abs=0.02)
    assert max(drawn) <= 10_000


def test_no_interval_leaves_the_scale_of_its_score() -> None:
    shares = np.array([0.9, 1.0, 1.0, 1.0, 0.2, 1.0])[:, None]
    open_, closed = interval(shares, mean), interval(shares, mean, bounds=(0.0, 1.0))
    assert open_.high is not None
    assert open_.high > 1
    assert closed == Interval(open_.low, 1.0, open_.method)
    small = np.array([0.0, 0.0, 0.0, 0.0, 0.3])[:, None]
    assert (interval(small, mean).low or 0) < 0
    assert interval(small, mean, bounds=(0.0, None)).low == 0.0
    apart = paired(1 - shares, shares, lambda sums, rows: 1.3 * mean(sums, rows), bounds=(0.0, 1.0)).interval
    assert apart.high == 1.0


@pytest.mark.parametrize("gained", [0, 3])
def test_the_interval_of_a_difference_of_shares_ends_at_one(gained: int) -> None:
    found = paired(right(3 - gained, 3), right(gained, 3), mean)
    centre = (2 * gained - 3) / 5
    reach = 1.959964 * np.sqrt(4 - 9 / 5) / 5
    assert abs(centre) + reach > 1
    ends = sorted([centre - reach, centre + reach])
    assert (found.interval.low, found.interval.high) == (
        pytest.approx(max(ends[0], -1.0), rel=1e-5),
        pytest.approx(min(ends[1], 1.0), rel=1e-5),
    )
    assert found.interval.method == "Agresti-Min"


@pytest.mark.parametrize("graded", [0, 1])
def test_a_graded_score_against_one_that_is_right_or_wrong_is_a_graded_comparison(graded: int) -> None:
    pair = [right(4, 9), right(4, 9)]
    pair[graded] = np.linspace(0.0, 1.0, 9)[:, None] ** 2
    found = paired(*pair, mean)
    assert (found.method, found.gained, found.lost) == ("permutation", None, None)
    assert found.interval.method == "bootstrap (BCa)"


@pytest.mark.parametrize(("value", "rows"), [(0.6, 4), (-0.3, 5), (0.9, 11), (0.0, 30)])
def test_the_interval_of_ranks_by_its_formula(value: float, rows: int) -> None:
    """Bonett and Wright (2000)."""
    found = spearman_interval(value, rows)
    spread = np.sqrt((1 + value**2 / 2) / (rows - 3))
    ends = np.tanh(np.arctanh(value) + np.array([-1.959964, 1.959964]) * spread)
    assert (found.low, found.high) == pytest.approx(tuple(ends), rel=1e-5)
    assert found.method == "Bonett-Wright"


def test_scores_that_are_all_equal_have_an_area_of_a_half_and_no_interval() -> None:
    found = auroc_rows(np.array([[True], [True], [False], [False], [False]]), np.ones((5, 1)))
    assert found is not None
    assert (found[0], found[1].tolist()) == (0.5, [[0.5]] * 5)
    assert auroc_interval(*found) == Interval(None, None, "none: the scores are all equal")
    # Added up in another precision than its rows.
    separated = Interval(None, None, "none: the scores separate the classes")
    assert auroc_interval(1.0, np.array([[1.0], [0.9], [1.0]])) == separated
    assert auroc_interval(0.5, None) == Interval(None, None, "none: one row of a class has no spread")
