"""Streamed scores of classifiers are those of scikit-learn and SciPy on all rows at once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from finray.objectives import classifier_scores
from finray.objectives.classifier_scores import ClassifierScores, ScoreSums

ROWS = 1000


def streamed(sums: ScoreSums, logits: torch.Tensor, labels: torch.Tensor, *, ranks: int = 3) -> ClassifierScores:
    """As ranks do it: each its own batches of odd sizes, and one sum at the end."""
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(labels)))
    totals = torch.zeros(ranks, sums.size(len(labels)), dtype=torch.float64)
    for number, rows in enumerate(order.split(11)):
        sums.add(totals[number % ranks], rows.tolist(), logits[rows], labels[rows])
    return sums.scores(totals.sum(0).tolist())


def drawn(classes: int, seed: int = 0) -> torch.Tensor:
    """Logits with many ties."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(ROWS, classes)).round(1)).float()


def check(found: ClassifierScores, expected: dict[str, float]) -> None:
    assert found.metrics == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("absent", ["", "label", "everywhere"])
def test_of_one_class_a_row(classes: int, absent: str) -> None:
    logits, draw = drawn(classes), np.random.default_rng(2)
    names = tuple(f"c{number}" for number in range(classes))
    labels = torch.from_numpy(draw.integers(0, classes - bool(absent), ROWS))
    if absent == "everywhere":
        logits[:, -1] = -50.0
    found = streamed(ScoreSums("single_label", names), logits, labels)
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    ids = list(range(classes))
    options: dict[str, Any] = {"labels": ids, "average": None, "zero_division": 0}
    precision, recall = sk.precision_score(truth, predicted, **options), sk.recall_score(truth, predicted, **options)
    expected = {
        "accuracy": sk.accuracy_score(truth, predicted),
        "f1_macro": sk.f1_score(truth, predicted, average="macro", zero_division=0),
        "f1_weighted": sk.f1_score(truth, predicted, average="weighted", zero_division=0),
        "matthews_corrcoef": sk.matthews_corrcoef(truth, predicted),
        **{f"precision_{name}": one for name, one in zip(names, precision, strict=True)},
        **{f"recall_{name}": one for name, one in zip(names, recall, strict=True)},
    }
    scores = logits.double().softmax(1).numpy()
    there = [one for one in ids if 0 < (truth == one).sum() < ROWS]
    if classes == 2 and there:
        expected["roc_auc"] = sk.roc_auc_score(truth, scores[:, 1])
    elif there:
        expected["roc_auc"] = float(np.mean([sk.roc_auc_score(truth == one, scores[:, one]) for one in there]))
        if not absent:
            assert expected["roc_auc"] == pytest.approx(sk.roc_auc_score(truth, scores, multi_class="ovr"))
    check(found, expected)
    assert np.array_equal(found.confusion, sk.confusion_matrix(truth, predicted, labels=ids))


@pytest.mark.parametrize("absent", [False, True])
def test_of_several_classes_a_row(absent: bool) -> None:
    logits, draw = drawn(4), np.random.default_rng(2)
    labels = torch.from_numpy((draw.random((ROWS, 4)) < 0.4).astype(np.float32))
    if absent:
        labels[:, 2] = 0
        logits[:, 2] = -1
    names = ("a", "b", "c", "d")
    found = streamed(ScoreSums("multi_label", names), logits, labels)
    truth, predicted, scores = labels.int().numpy(), (logits > 0).int().numpy(), logits.double().sigmoid().numpy()
    options: dict[str, Any] = {"average": None, "zero_division": 0}
    by_class = zip(
        names,
        sk.precision_score(truth, predicted, **options),
        sk.recall_score(truth, predicted, **options),
        strict=True,
    )
    there = [one for one in range(4) if truth[:, one].any()]
    expected = {
        "accuracy": sk.accuracy_score(truth, predicted),
        "f1_macro": sk.f1_score(truth, predicted, average="macro", zero_division=0),
        "f1_weighted": sk.f1_score(truth, predicted, average="weighted", zero_division=0),
        "roc_auc": sk.roc_auc_score(truth[:, there], scores[:, there], average="macro"),
    }
    for name, precision, recall in by_class:
        expected |= {f"precision_{name}": precision, f"recall_{name}": recall}
    check(found, expected)
    assert found.confusion == ()


def test_of_numbers() -> None:
    draw = np.random.default_rng(2)
    labels = torch.from_numpy(draw.normal(5, 2, ROWS).round(0)).float()
    logits = (labels[:, None] * 0.3 + torch.from_numpy(draw.normal(size=(ROWS, 1)).round(1))).float()
    found = streamed(ScoreSums("regression", ()), logits, labels)
    truth, predicted = labels.double().numpy(), logits[:, 0].double().numpy()
    expected = {
        "mean_squared_error": sk.mean_squared_error(truth, predicted),
        "pearson": stats.pearsonr(truth, predicted).statistic,
        "spearman": stats.spearmanr(truth, predicted).statistic,
    }
    check(found, expected)
    same = streamed(ScoreSums("regression", ()), torch.ones(ROWS, 1), labels)
    assert same.metrics.keys() == {"mean_squared_error"}


def test_one_class_alone_has_no_auroc() -> None:
    found = streamed(ScoreSums("single_label", ("a", "b")), drawn(2), torch.zeros(ROWS, dtype=torch.int64))
    assert "roc_auc" not in found.metrics
    assert found.metrics["matthews_corrcoef"] == 0.0


def test_more_places_than_memory_should_hold_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names, labels = ("a", "b", "c"), torch.from_numpy(np.random.default_rng(2).integers(0, 3, ROWS))
    whole = streamed(ScoreSums("single_label", names), drawn(3), labels)
    monkeypatch.setattr(classifier_scores, "MAX_SLOTS", 4 * ROWS - 1)
    sums = ScoreSums("single_label", names)
    assert sums.size(ROWS) == 9
    counted = streamed(sums, drawn(3), labels)
    assert {**counted.metrics, "roc_auc": whole.metrics["roc_auc"]} == whole.metrics
    assert counted.confusion == whole.confusion


def test_a_row_in_another_place_is_another_auroc() -> None:
    """Negative control: labels and scores that do not belong together."""
    labels = torch.from_numpy(np.random.default_rng(2).integers(0, 2, ROWS))
    sums, total = ScoreSums("single_label", ("a", "b")), torch.zeros(4 + 2 * ROWS, dtype=torch.float64)
    sums.add(total, list(range(ROWS)), drawn(2), labels)
    right = sums.scores(total.tolist()).metrics["roc_auc"]
    total[4:].view(-1, 2)[:, 1] = total[4:].view(-1, 2)[:, 1].flip(0)
    with warnings.catch_warnings():
        assert sums.scores(total.tolist()).metrics["roc_auc"] != pytest.approx(right, abs=1e-3)
