"""Conclusions from the scores of a limited number of rows: intervals, paired tests, and one sentence.

Scores come as statistics of rows that add up (:mod:`finray.evaluation.scores.base`), so one bootstrap and one
permutation test serve means and corpus scores alike. All draws follow from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from finray.evaluation.scores.base import Bounds, FloatArray

Total = Callable[[FloatArray, int], float]
LEVEL = 0.95
# Resamples of a bootstrap, and swaps of a permutation test. The third digit no longer depends on them.
_RESAMPLES = 2000
_SWAPS = 4000
# Up to this many rows, enumerating all swaps is cheaper.
_ALL_SWAPS = 12
# Above so many rows, bootstrap, jackknife and permutation take this many groups of rows instead: a score of so many
# rows is as good as normal, and its spread follows from groups as well as from rows.
_MOST_ROWS, _GROUPS = 10_000, 5_000
# With more columns, such as the cells of a confusion matrix, counting how often each row is drawn pays off.
_COLUMNS = 8
# Random numbers in memory at a time.
_HELD = 2**22


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval; without bounds if the rows say nothing about their spread."""

    low: float | None
    high: float | None
    method: str


@dataclass(frozen=True, slots=True)
class Paired:
    """Comparison of two models on the same rows."""

    difference: float  # the second's score minus the first's
    interval: Interval  # of the difference
    p: float  # p-value: probability of a difference at least as large if the models are equally good
    method: str  # the name of the test
    gained: int | None = None  # rows that only the second gets right, for 0/1 scores
    lost: int | None = None  # rows that only the first gets right


def is_right_or_wrong(statistics_NK: FloatArray) -> bool:
    """Whether rows are either right (1) or wrong (0)."""
    return statistics_NK.shape[1] == 1 and bool(np.isin(statistics_NK, (0.0, 1.0)).all())


def interval(statistics_NK: FloatArray, total: Total, *, seed: int = 0, bounds: Bounds = (None, None)) -> Interval:
    """The 95 % interval of a score.

    For 0/1 rows it is Wilson's interval (1927), which is also valid at 0 % and 100 % and for few rows. Otherwise a
    bootstrap (BCa: Efron 1987), whose quantiles are widened for few rows as in Hesterberg (2015, "What teachers should
    know about the bootstrap", section 5.3); each end is at least as far out as Student's t with the jackknife's
    standard error, because few rows of a skewed score say little about their tail. No end is out of bounds.

    Args:
        statistics_NK: of each row.
        total: the score, from sums of statistics and the number of rows.
        seed: for the resamples.
        bounds: of the score.
    """
    # Here and below: its import takes a second, which reading scores can save.
    from scipy import stats

    rows = len(statistics_NK)
    if rows and is_right_or_wrong(statistics_NK):
        wilson = stats.binomtest(int(statistics_NK.sum()), rows).proportion_ci(LEVEL, method="wilson")
        return Interval(float(wilson.low), float(wilson.high), "Wilson")
    if rows < 2:
        return Interval(None, None, "none: one row has no spread")
    return _bootstrap(*_grouped(statistics_NK, seed), total, seed, bounds)


def _grouped(statistics_NK: FloatArray, seed: int) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Statistics (G, K) of groups of rows drawn at random, and the number of rows of each; of few rows, each is one."""
    rows = len(statistics_NK)
    if rows <= _MOST_ROWS:
        return statistics_NK, np.ones(rows, dtype=np.int64)
    order = np.random.default_rng([seed, 3]).permutation(rows)
    edges = np.linspace(0, rows, _GROUPS + 1).astype(np.int64)
    return np.add.reduceat(statistics_NK[order], edges[:-1], axis=0), np.diff(edges)


def _bootstrap(
    statistics_GK: FloatArray, sizes_G: npt.NDArray[np.int64], total: Total, seed: int, bounds: Bounds
) -> Interval:
    from scipy import stats

    groups, rows = len(sizes_G), int(sizes_G.sum())
    whole = statistics_GK.sum(0)
    with_sizes = np.concatenate([statistics_GK, sizes_G[:, None]], axis=1)
    resampled = np.sort([total(sums[:-1], int(sums[-1])) for sums in _resampled_sums(with_sizes, seed)])
    observed = total(whole, rows)
    if resampled[0] == resampled[-1]:
        return Interval(None, None, "none: all rows have the same score")
    share = (np.sum(resampled < observed) + 0.5 * np.sum(resampled == observed)) / len(resampled)
    bias = float(stats.norm.ppf(np.clip(share, 0.5 / len(resampled), 1 - 0.5 / len(resampled))))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, groups - 1))
    widened = math.sqrt(groups / (groups - 1)) * quantile
    left_out = np.array(
        [total(whole - group_K, rows - size) for group_K, size in zip(statistics_GK, sizes_G.tolist(), strict=True)]
    )
    spread = left_out.mean() - left_out
    squares = float((spread**2).sum())
    acceleration = float((spread**3).sum() / (6 * squares**1.5)) if squares else 0.0
    reach = quantile * math.sqrt(squares * (groups - 1) / groups)
    ends = []
    for z in (bias - widened, bias + widened):
        # Of two rows the acceleration is 0 (but for rounding), and of many below 1/6: the divisor is at least 0.09.
        level = stats.norm.cdf(bias + z / (1 - acceleration * z))
        ends.append(float(np.quantile(resampled, level)))
    low, high = min(ends[0], observed - reach), max(ends[1], observed + reach)
    return Interval(*within(low, high, observed, bounds), "bootstrap (BCa)")


def within(low: float, high: float, observed: float, bounds: Bounds) -> tuple[float, float]:
    """The ends, as far as the scale reaches: what lies beyond cannot be the truth."""
    least, most = bounds
    return (
        low if least is None else min(max(low, least), observed),
        high if most is None else max(min(high, most), observed),
    )


def _resampled_sums(statistics_GK: FloatArray, seed: int) -> Iterator[FloatArray]:
    """Sums over G rows drawn with replacement, ``_RESAMPLES`` times."""
    rows, columns = statistics_GK.shape
    generator = np.random.default_rng([seed, 1])
    held = max(1, _HELD // rows)
    for start in range(0, _RESAMPLES, held):
        size = min(held, _RESAMPLES - start)
        chosen = generator.integers(0, rows, size=(size, rows))
        if columns > _COLUMNS:
            chosen += rows * np.arange(size)[:, None]
            yield from np.bincount(chosen.ravel(), minlength=chosen.size).reshape(size, rows) @ statistics_GK
        else:
            yield from np.stack([column[chosen].sum(1) for column in statistics_GK.T], axis=1)


def auroc_rows(truth_NC: npt.NDArray[np.bool_], scores_NC: FloatArray) -> tuple[float, FloatArray] | None:
    """The area under the ROC curve, or the mean over classes, each against the rest; and what each row adds to it.

    From the placements of rows (DeLong, DeLong and Clarke-Pearson 1988), with ranks as in Sun and Xu (2014). A row
    counts in all classes, so its parts are added first.

    Args:
        truth_NC: which classes a row has. A class of all rows or none has no area, and counts in no mean.
        scores_NC: of each class; higher for rows that have it.

    Returns:
        The area, and (N, 1) numbers whose mean it is and whose standard error is DeLong's; None if one row of a class
        has no spread, or no class an area.
    """
    from scipy import stats

    parts_N, areas = np.zeros(len(truth_NC)), list[float]()
    for truth, scores in zip(truth_NC.T, scores_NC.T, strict=True):
        there, others = int(truth.sum()), int((~truth).sum())
        if not there or not others:
            continue
        if min(there, others) == 1:
            return None
        ranks = stats.rankdata(scores)
        above = (ranks[truth] - stats.rankdata(scores[truth])) / others
        below = 1 - (ranks[~truth] - stats.rankdata(scores[~truth])) / there
        areas.append(float(above.mean()))
        parts_N[truth] += (above - above.mean()) / math.sqrt(there * (there - 1))
        parts_N[~truth] += (below - below.mean()) / math.sqrt(others * (others - 1))
    if not areas:
        return None
    area = float(np.mean(areas))
    return area, area + len(parts_N) / len(areas) * parts_N[:, None]


def auroc_interval(area: float, rows_N1: FloatArray | None) -> Interval:
    """The 95 % interval of an area with the rows of :func:`auroc_rows`, on the scale of the logit, which keeps the ends
    between 0 and 1."""
    from scipy import special, stats

    if rows_N1 is None:
        return Interval(None, None, "none: one row of a class has no spread")
    error = float(np.linalg.norm(rows_N1 - area)) / len(rows_N1)
    # The area may have been added up in another precision than the rows, and be 1 where they are not.
    if not error or not 0 < area < 1:
        why = "are all equal" if area == 0.5 else "separate the classes"
        return Interval(None, None, f"none: the scores {why}")
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * error / (area * (1 - area))
    low, high = special.expit(special.logit(area) + np.array([-reach, reach])).tolist()
    return Interval(low, high, "DeLong")


def spearman_interval(value: float, rows: int) -> Interval:
    """The 95 % interval of a rank correlation, by Fisher's transformation (Bonett and Wright 2000)."""
    from scipy import stats

    if rows < 4 or abs(value) >= 1:
        return Interval(None, None, "none: too few rows, or the order is the same")
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    return Interval(math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach), "Bonett-Wright")


def paired(
    first_NK: FloatArray, second_NK: FloatArray, total: Total, *, seed: int = 0, bounds: Bounds = (None, None)
) -> Paired:
    """Test whether the second of two models is better on the same rows.

    For 0/1 rows: McNemar's exact test, and the interval of Agresti and Min (2005) for the difference. Otherwise: a
    permutation test that swaps each row's two results, and the bootstrap over rows.

    Args:
        first_NK: statistics of each row for one model.
        second_NK: for the other, rows in the same order.
        total: the score, from sums of statistics and the number of rows.
        seed: for random draws.
        bounds: of the score.
    """
    from scipy import stats

    rows, columns = first_NK.shape

    def difference(sums: FloatArray, rows: int) -> float:
        return total(sums[columns:], rows) - total(sums[:columns], rows)

    both = np.concatenate([first_NK, second_NK], axis=1)
    observed = difference(both.sum(0), rows)
    if is_right_or_wrong(first_NK) and is_right_or_wrong(second_NK):
        gained, lost = int((second_NK > first_NK).sum()), int((second_NK < first_NK).sum())
        p = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
        centre = (gained - lost) / (rows + 2)
        error = math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (rows + 2)) / (rows + 2)
        reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * error
        agresti_min = Interval(max(-1.0, centre - reach), min(1.0, centre + reach), "Agresti-Min")
        return Paired(observed, agresti_min, p, "exact McNemar", gained, lost)
    if rows < 2:
        return Paired(observed, Interval(None, None, "none: one row has no spread"), 1.0, "permutation")
    both_GK, sizes_G = _grouped(both, seed)
    least, most = bounds
    apart = None if least is None or most is None else most - least
    span = _bootstrap(both_GK, sizes_G, difference, seed, (None if apart is None else -apart, apart))
    p = _permutation(both_GK[:, :columns], both_GK[:, columns:], rows, total, observed, seed)
    return Paired(observed, span, p, "permutation")


def _permutation(
    first_GK: FloatArray, second_GK: FloatArray, rows: int, total: Total, observed: float, seed: int
) -> float:
    groups = len(first_GK)
    moved_GK, whole_K = second_GK - first_GK, (first_GK + second_GK).sum(0)
    extreme = drawn = 0
    # Ignore rounding errors of sums.
    least = abs(observed) * (1 - 1e-9) - 1e-12
    for signs in _signs(groups, seed):
        apart_K = signs @ moved_GK
        extreme += abs(total((whole_K + apart_K) / 2, rows) - total((whole_K - apart_K) / 2, rows)) >= least
        drawn += 1
    # The enumeration of all swaps includes the observed one; to a sample, it is added (Phipson and Smyth 2010).
    return extreme / drawn if groups <= _ALL_SWAPS else (extreme + 1) / (drawn + 1)


def _signs(rows: int, seed: int) -> Iterator[FloatArray]:
    if rows <= _ALL_SWAPS:
        for number in range(2**rows):
            yield np.array([1.0 if number >> row & 1 else -1.0 for row in range(rows)])
        return
    generator = np.random.default_rng([seed, 2])
    held = max(1, _HELD // rows)
    for start in range(0, _SWAPS, held):
        yield from generator.choice([-1.0, 1.0], size=(min(held, _SWAPS - start), rows))


def adjusted(p: list[float]) -> list[float]:
    """P-values of several comparisons, adjusted for their number (Holm 1979)."""
    order = sorted(range(len(p)), key=p.__getitem__)
    least = accumulate((min(1.0, p[number] * (len(p) - rank)) for rank, number in enumerate(order)), max)
    by_place = dict(zip(order, least, strict=True))
    return [by_place[number] for number in range(len(p))]


def are_apart(pair: Paired) -> bool:
    """Whether two models can be told apart: the test and the interval must both say so."""
    span = pair.interval
    both = span.low is None or span.high is None or span.low * span.high > 0
    return bool(pair.p < 1 - LEVEL and both and pair.difference)


def change(pair: Paired, score: str, values: tuple[str, str], higher_is_better: bool | None) -> str:
    """How a score changed from one model to another that can be told apart: a part of a sentence."""
    word = "" if higher_is_better is None else "better, " if (pair.difference > 0) is higher_is_better else "worse, "
    return f"{score} from {values[0]} to {values[1]} ({word}{p_text(pair.p)})"


def sentence(
    pair: Paired,
    *,
    name: str,
    other: str,
    score: str,
    rows: int,
    shown: Callable[[float], str],
    higher_is_better: bool | None,
    values: tuple[str, str] = ("", ""),
) -> str:
    """The conclusion about two models, in plain words; it does not judge where it is not known what is better.

    Args:
        pair: the second model against the first.
        name: of the second model.
        other: of the first.
        score: its name.
        rows: number of scored rows.
        shown: formats a difference without its sign.
        higher_is_better: False as for losses; None where it is not known.
        values: of the first and the second model, where it is not known what is better.
    """
    span, less = pair.interval, higher_is_better is False
    gain = -pair.difference if less else pair.difference
    what, few = f"on {score}", " So few rows speak for these rows only." if rows < 30 else ""
    if span.low is None or span.high is None:
        evidence, few = f"({p_text(pair.p)}, {rows} rows without any spread)", ""
    else:
        ends = sorted((-span.low, -span.high) if less else (span.low, span.high))
        sizes = " to ".join(f"{'-' if end < 0 else '+'}{shown(abs(end))}" for end in ends)
        of = "difference" if higher_is_better is None else "gain"
        evidence = f"(95 % interval of the {of} {sizes}, {p_text(pair.p)}, {rows} rows)"
    if are_apart(pair):
        if higher_is_better is None:
            return (
                f"{score} changed from {values[0]} of {other} to {values[1]} of {name} {evidence}.{few} Whether more "
                "or less is better is not known: `higher_is_better` of the function says so."
            )
        word = "better" if gain > 0 else "worse"
        return f"{name} is {word} than {other} {what}: by {shown(abs(gain))} {evidence}.{few}"
    if span.low is None or span.high is None:
        return f"{name} and {other} cannot be told apart {what}: {rows} rows show no spread to judge by."
    return (
        f"{name} and {other} cannot be told apart {what} from {rows} rows: the difference of {shown(abs(gain))} may be "
        f"chance {evidence}."
    )


def p_text(p: float) -> str:
    """A p-value with two digits, or that it is below what is worth a digit."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
