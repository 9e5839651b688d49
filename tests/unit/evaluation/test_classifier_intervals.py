"""Which scores of a classifier have an interval, and that it is that of a plain bootstrap over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn import metrics as sk

from finray.evaluation.classifiers import _statistics
from finray.evaluation.classify import Classification
from finray.evaluation.statistics import interval
from finray.tasks.classifier_scores import ScoreSums

pytestmark = pytest.mark.long

NAMES = ("a", "b", "c")
ROWS = 150


def draw(seed: int) -> tuple[list[str], list[str]]:
    """Truths, and predictions that are right in most rows and never say `c` where it is `b`."""
    random = np.random.default_rng(seed)
    truth = random.choice(NAMES, ROWS, p=[0.5, 0.3, 0.2]).tolist()
    said = [one if random.random() < 0.7 else str(random.choice(NAMES[:2])) for one in truth]
    return truth, said


def plain_bootstrap(score: Callable[[Any], float], rows: int) -> tuple[float, float]:
    random = np.random.default_rng(7)
    found = [score(random.integers(0, rows, rows)) for _ in range(1500)]
    return tuple(np.quantile(found, (0.025, 0.975)).tolist())


def check(statistics: Any, total: Any, right: Callable[[Any], float], rows: int, *, near: float) -> None:
    whole = right(np.arange(rows))
    assert total(statistics.sum(0), len(statistics)) == pytest.approx(whole, rel=1e-9)
    found, (low, high) = interval(statistics, total), plain_bootstrap(right, rows)
    assert found.low is not None
    assert found.high is not None
    if low == high:
        # Resamples of rows that are all right say nothing; a share of few rows has an interval all the same.
        assert found.high == whole == 1.0
        assert 0.8 < found.low < 1.0
        return
    assert found.low == pytest.approx(low, abs=near)
    assert found.high == pytest.approx(high, abs=near)


def test_precision_and_recall_of_each_class() -> None:
    truth, said = draw(1)
    sums = ScoreSums("single_label", NAMES)
    totals, _, others = _statistics(sums, truth, {"m": [Classification(one) for one in said]})
    assert set(totals) == {"accuracy", "f1_macro", "f1_weighted", "matthews_corrcoef"}
    assert set(others["m"]) == {f"{kind}_{name}" for kind in ("precision", "recall") for name in NAMES}
    truths, says = np.array(truth), np.array(said)
    for kind, of in (("precision", sk.precision_score), ("recall", sk.recall_score)):
        for name in NAMES:
            score, statistics = others["m"][f"{kind}_{name}"]

            def right(rows: Any, of: Any = of, name: str = name) -> float:
                return float(of(truths[rows], says[rows], labels=[name], average=None, zero_division=0)[0])

            check(statistics, score.total, right, ROWS, near=0.04)


def test_f1_of_several_labels_is_compared() -> None:
    random = np.random.default_rng(2)
    truth = random.random((ROWS, 3)) < (0.6, 0.3, 0.2)
    said = truth ^ (random.random((ROWS, 3)) < 0.2)

    def named(row: Sequence[bool]) -> tuple[str, ...]:
        return tuple(name for name, there in zip(NAMES, row, strict=True) if there)

    predicted = [Classification(named(row)) for row in said]
    totals, found, others = _statistics(
        ScoreSums("multi_label", NAMES), [named(row) for row in truth], {"m": predicted}
    )
    assert set(totals) == {"accuracy", "f1_macro", "f1_weighted"}
    assert "recall_c" in others["m"]
    for name, average in (("f1_macro", "macro"), ("f1_weighted", "weighted")):

        def right(rows: Any, average: str = average) -> float:
            return float(sk.f1_score(truth[rows], said[rows], average=average, zero_division=0))

        check(found["m"][name], totals[name].total, right, ROWS, near=0.02)
    assert found["m"]["accuracy"].mean() == (truth == said).all(1).mean()


def test_pearsons_correlation_of_numbers_far_from_zero() -> None:
    random = np.random.default_rng(3)
    truth = 1e6 + random.normal(size=ROWS)
    said = truth + random.normal(size=ROWS)
    predicted = [Classification(float(one)) for one in said]
    _, _, others = _statistics(ScoreSums("regression", ()), truth.tolist(), {"m": predicted})
    score, statistics = others["m"]["pearson"]
    check(statistics, score.total, lambda rows: float(pearsonr(truth[rows], said[rows])[0]), ROWS, near=0.04)
