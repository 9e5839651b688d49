"""Intervals of a classifier's scores: against a plain bootstrap over rows, DeLong's definition, and simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm, pearsonr, spearmanr
from sklearn import metrics as sk
from torch.nn import functional

from finray.config.resolved import LabelSet
from finray.evaluation import statistics
from finray.evaluation.classifiers import Mean, Pearson, _contrasts, _in_order, _losses, _statistics, commonest
from finray.evaluation.classify import Classification, Classified
from finray.evaluation.statistics import Interval, auroc_interval, auroc_rows, interval, paired, spearman_interval
from finray.objectives.classifier_scores import ScoreSums

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
    found = [score(random.integers(0, rows, rows)) for _ in range(600)]
    return tuple(np.quantile(found, (0.025, 0.975)).tolist())


def check(rows_NK: Any, total: Any, right: Callable[[Any], float], rows: int, *, near: float) -> None:
    whole = right(np.arange(rows))
    assert total(rows_NK.sum(0), len(rows_NK)) == pytest.approx(whole, rel=1e-9)
    found, (low, high) = interval(rows_NK, total), plain_bootstrap(right, rows)
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
    assert set(totals) == {"accuracy", "f1_macro", "f1_weighted", "matthews_corrcoef", "eval_loss"}
    # What is shown as a percentage, and what is better where it is less.
    assert [name for name, one in totals.items() if not one.is_share] == ["matthews_corrcoef", "eval_loss"]
    assert [name for name, one in totals.items() if not one.higher_is_better] == ["eval_loss"]
    assert set(others["m"]) == {f"{kind}_{name}" for kind in ("precision", "recall") for name in NAMES}
    truths, says = np.array(truth), np.array(said)
    for kind, of in (("precision", sk.precision_score), ("recall", sk.recall_score)):
        for name in NAMES:
            score, rows_NK = others["m"][f"{kind}_{name}"]

            # By its definition, for scikit-learn checks its input anew in each of thousands of samples.
            def right(rows: Any, kind: str = kind, name: str = name) -> float:
                is_it, is_said = truths[rows] == name, says[rows] == name
                return float((is_it & is_said).sum() / (is_said if kind == "precision" else is_it).sum())

            expected = float(of(truths, says, labels=[name], average=None)[0])
            assert right(np.arange(len(truths))) == pytest.approx(expected)
            check(rows_NK, score.total, right, ROWS, near=0.04)


def test_f1_of_several_labels_is_compared() -> None:
    random, names = np.random.default_rng(2), (*NAMES, "d")
    truth = random.random((ROWS, 4)) < (0.6, 0.3, 0.2, 0.3)
    said = truth ^ (random.random((ROWS, 4)) < 0.2)

    def named(row: Sequence[bool]) -> tuple[str, ...]:
        return tuple(name for name, there in zip(names, row, strict=True) if there)

    predicted = [Classification(named(row)) for row in said]
    totals, found, others = _statistics(
        ScoreSums("multi_label", names), [named(row) for row in truth], {"m": predicted}
    )
    assert set(totals) == {"accuracy", "f1_macro", "f1_weighted", "eval_loss"}
    assert [name for name, one in totals.items() if not one.is_share] == ["eval_loss"]
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
    totals, found, _ = _statistics(ScoreSums("regression", ()), truth.tolist(), {"m": predicted})
    check(
        found["m"]["pearson"],
        totals["pearson"].total,
        lambda rows: float(pearsonr(truth[rows], said[rows])[0]),
        ROWS,
        near=0.04,
    )
    assert [(name, one.is_share, one.higher_is_better) for name, one in totals.items()] == [
        ("mean_squared_error", False, False),
        ("pearson", False, True),
    ]


def interval_of_auroc(truth: Any, scores: Any) -> Interval:
    found = auroc_rows(truth, scores)
    assert found is not None
    return auroc_interval(*found)


def one_hot(truth: Any, classes: int) -> Any:
    return np.eye(classes, dtype=bool)[truth]


@pytest.mark.parametrize(("rows", "ties"), [(40, False), (300, True)])
def test_the_interval_of_auroc_is_delongs(rows: int, ties: bool) -> None:
    """Against the definition, pair by pair."""
    random = np.random.default_rng(rows)
    truth = random.random(rows) < 0.3
    scores = random.normal(size=rows) + 1.3 * truth
    scores = scores.round() if ties else scores
    won = (scores[truth][:, None] > scores[~truth]) + 0.5 * (scores[truth][:, None] == scores[~truth])
    area = won.mean()
    assert area == pytest.approx(sk.roc_auc_score(truth, scores))
    m, n = won.shape
    error = np.sqrt(won.mean(1).var(ddof=1) / m + won.mean(0).var(ddof=1) / n)
    odds = area / (1 - area) * np.exp(np.array([-1.959964, 1.959964]) * error / (area * (1 - area)))
    found = interval_of_auroc(truth[:, None], scores[:, None])
    assert (found.low, found.high) == pytest.approx(tuple(odds / (1 + odds)), rel=1e-6)


def test_the_interval_of_a_mean_auroc_is_near_a_bootstrap() -> None:
    """Rows count in all classes: intervals that ignore this are too narrow or too wide."""
    random = np.random.default_rng(5)
    truth = random.choice(3, 240, p=[0.5, 0.3, 0.2])
    logits = random.normal(size=(240, 3)) + 1.2 * one_hot(truth, 3)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def right(rows: Any) -> float:
        return float(sk.roc_auc_score(truth[rows], scores[rows], multi_class="ovr"))

    low, high = plain_bootstrap(right, 240)
    found = interval_of_auroc(one_hot(truth, 3), scores)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [30, 200])
def test_intervals_of_ranks_hold_the_truth_in_95_of_100_samples(rows: int) -> None:
    random, held = np.random.default_rng(11), np.zeros(2)
    area, correlation = norm.cdf(1 / np.sqrt(2)), 6 / np.pi * np.arcsin(0.6 / 2)
    for _ in range(1000):
        truth = np.arange(rows) % 2 == 0
        span = interval_of_auroc(truth[:, None], (random.normal(size=rows) + truth)[:, None])
        held[0] += (span.low or 0) <= area <= (span.high or 0)
        one, other = random.multivariate_normal((0, 0), ((1, 0.6), (0.6, 1)), rows).T
        span = spearman_interval(float(spearmanr(one, other)[0]), rows)
        held[1] += (span.low or 0) <= correlation <= (span.high or 0)
    assert (held >= 930).all(), held
    assert (held <= 970).all(), held


def test_ranks_without_a_spread_have_no_interval() -> None:
    truth = np.array([True, True, False, False])
    assert interval_of_auroc(truth[:, None], np.array([[4.0], [3], [2], [1]])).low is None
    assert interval_of_auroc(truth[:, None], np.array([[4.0], [2], [3], [1]])).low is not None
    assert auroc_rows(truth[1:, None], np.array([[2.0], [3], [1]])) is None
    # The score is a mean over both classes, one of which has one row; one without rows counts in neither.
    two = np.stack([truth, [True, False, False, False], [False] * 4], axis=1)
    scores = np.array([[4.0, 3, 1], [2, 4, 1], [3, 2, 1], [1, 1, 1]])
    assert auroc_rows(two, scores) is None
    assert interval_of_auroc(two[:, ::2], scores[:, ::2]) == interval_of_auroc(two[:, :1], scores[:, :1])
    assert spearman_interval(1.0, 50).low is None
    assert spearman_interval(0.5, 3).low is None


@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_the_loss_of_rows_is_that_of_their_probabilities(problem: Any) -> None:
    random = np.random.default_rng(8)
    logits = torch.tensor(random.normal(size=(20, 3)) * 3)
    truth = one_hot(random.integers(0, 3, 20), 3)
    if problem == "multi_label":
        truth = random.random((20, 3)) < 0.4
        expected = functional.binary_cross_entropy_with_logits(logits, torch.tensor(truth).double())
        probabilities = logits.sigmoid()
    else:
        expected = functional.cross_entropy(logits, torch.tensor(truth.argmax(1)))
        probabilities = logits.softmax(-1)
    named = [tuple(np.array(NAMES)[row].tolist()) for row in truth]
    truths = named if problem == "multi_label" else [one[0] for one in named]
    # Another classifier, with other ids, and one class more.
    order = ("c", "x", "a", "b")
    shuffled = torch.stack([probabilities[:, 2], probabilities[:, 0] * 0, *probabilities.T[:2]], dim=1)
    label: Any = () if problem == "multi_label" else "a"
    said = Classified(
        LabelSet(problem, order), tuple(Classification(label, tuple(one)) for one in shuffled.tolist()), None
    )
    totals, found, _ = _statistics(ScoreSums(problem, NAMES), truths, {"m": _in_order(said, NAMES)})
    assert totals["eval_loss"].higher_is_better is False
    assert found["m"]["eval_loss"].mean() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("score", ["roc_auc", "spearman"])
def test_equal_models_differ_in_5_of_100_samples(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_RESAMPLES", 10)
    monkeypatch.setattr(statistics, "_SWAPS", 200)
    random, found = np.random.default_rng(99), []
    labels = LabelSet("regression", ()) if score == "spearman" else LabelSet("single_label", ("a", "b"))
    total: Any = Pearson().total if score == "spearman" else Mean(is_share=False).total
    for _ in range(400):
        truth = random.normal(size=60)
        shared = truth + random.normal(size=60)
        said = [shared + random.normal(size=60) for _ in range(2)]
        if score == "spearman":
            rows = [_contrasts(labels, truth.tolist(), [Classification(float(x)) for x in one]) for one in said]
        else:
            names = ["b" if one > 0 else "a" for one in truth]
            rows = [_contrasts(labels, names, [Classification("a", (-x, x)) for x in one]) for one in said]
        found.append(paired(rows[0][score], rows[1][score], total).p)
    assert 0.02 <= np.mean(np.array(found) < 0.05) <= 0.08
    assert 0.4 <= np.mean(found) <= 0.6


@pytest.mark.parametrize("constant", ["truth", "predictions"])
def test_equal_numbers_have_no_correlation_and_none_is_compared(constant: str) -> None:
    several, equal = [0.5, 1.0, 2.0, 1.5], [1.0] * 4
    truth, said = (equal, several) if constant == "truth" else (several, equal)
    predicted = [Classification(one) for one in said]
    _, found, _ = _statistics(ScoreSums("regression", ()), truth, {"m": predicted})
    assert set(found["m"]) == {"mean_squared_error"}
    assert _contrasts(LabelSet("regression", ()), truth, predicted) == {}
    # The control: both vary.
    predicted = [Classification(one) for one in several]
    assert "pearson" in _statistics(ScoreSums("regression", ()), several, {"m": predicted})[1]["m"]
    assert "spearman" in _contrasts(LabelSet("regression", ()), several, predicted)
    # Nor have rows of one class an area.
    said = [Classification("b", (0.4, 0.6))] * 4
    assert _contrasts(LabelSet("single_label", ("a", "b")), ["b"] * 4, said) == {}


# --- what is computed from predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "truths"),
    [
        (LabelSet("single_label", NAMES), ["a", "b", "c", "a", "b", "c", "b"]),
        (LabelSet("multi_label", ("a", "b")), [("a",), ("a", "b"), (), ("b",), ("a",), ("b",), ()]),
    ],
)
def test_areas_of_several_classes_are_compared_by_the_mean_of_all(labels: LabelSet, truths: list[Any]) -> None:
    """Each class against the rest, pair by pair; ties count half."""
    said = np.random.default_rng(3).dirichlet(np.ones(len(labels.names)), len(truths)).round(1)
    areas = []
    for number, name in enumerate(labels.names):
        right, scores = np.array([name in truth for truth in truths]), said[:, number]
        there, others = scores[right][:, None], scores[~right]
        areas.append(((there > others) + 0.5 * (there == others)).mean())
    predicted = [Classification("a", tuple(row)) for row in said]
    found = _contrasts(labels, truths, predicted)["roc_auc"]
    assert found.shape == (7, 1)
    assert found.mean() == pytest.approx(np.mean(areas))


def test_the_area_of_two_classes_is_that_of_the_second() -> None:
    """Its probabilities are told apart where those of the first are all one."""
    said = [("yes", 1e-9), ("no", 1e-12), ("yes", 1e-3), ("no", 1e-10), ("no", 0.5), ("yes", 1e-11)]
    predicted = [Classification("no", (float(np.float32(1 - one)), one)) for _, one in said]
    found = _contrasts(LabelSet("single_label", ("no", "yes")), [name for name, _ in said], predicted)
    # Of nine pairs, 1e-9 and 1e-3 are above two each, and 1e-11 is above one.
    assert found["roc_auc"].mean() == pytest.approx(5 / 9)


def test_a_loss_of_what_was_thought_impossible_is_finite() -> None:
    truth = np.array([[True, False], [True, False]])
    single = _losses(truth, np.array([[0.0, 1.0], [0.25, 0.75]]), True)
    assert single[:, 0].tolist() == pytest.approx([300 * np.log(10), np.log(4)])
    several = _losses(truth, np.array([[0.0, 1.0], [0.25, 0.0]]), False)
    assert several[:, 0].tolist() == pytest.approx([16 * np.log(10), np.log(4) / 2])


def test_the_best_guess_without_looking() -> None:
    def of(labels: list[Any], problem: Any) -> Any:
        train: Any = SimpleNamespace(labels=labels)
        return commonest(train, LabelSet(problem, () if problem == "regression" else NAMES))

    assert of(["c", "b", "c", "a"], "single_label") == "c"
    assert of([1.0, 2.0, 6.0], "regression") == 3.0
    # Classes that more than half of the rows have.
    assert of([("a", "b"), ("b",), ("c", "b"), ("c",)], "multi_label") == ("b",)
    assert of([("a", "c"), ("c",), ()], "multi_label") == ("c",)
    assert of([(), ()], "multi_label") == ()
