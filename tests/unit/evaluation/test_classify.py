"""Classifying rows: labels, probabilities and scores are those of plain Transformers, a row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from finray.config.resolved import LabelSet, Problem
from finray.errors import DataError
from finray.evaluation import classify as module
from finray.evaluation.classify import classify
from finray.models.classifier import head_options
from tests.support import tiny

NAMES = ("bad", "fair", "good")
LENGTHS = (9, 4, 9, 13, 2, 4, 7)


def rows() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(5)
    return [(draw.integers(6, 380, length).astype(np.int32), np.zeros(length, np.uint8)) for length in LENGTHS]


def test_of_several_labels_those_more_likely_than_not_are_predicted() -> None:
    said = module._prediction(LabelSet("multi_label", NAMES), torch.tensor([-0.3, 0.2, -2.0]))
    assert said.label == ("fair",)
    assert said.probabilities == pytest.approx([0.42556, 0.54983, 0.1192], abs=1e-4)


def classifier(problem: Problem, family: str = "distilbert") -> Any:
    names = () if problem == "regression" else NAMES
    options = head_options(LabelSet(problem, names))
    return tiny.build_classifier(family, classes=len(names) or 1, **options).eval()


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        alone = [model(input_ids=torch.from_numpy(ids)[None].long()).logits for ids, _ in rows()]
    found: np.ndarray[Any, Any] = torch.cat(alone).double().numpy()
    return found


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("family", ["distilbert", "llama"])
def test_each_row_gets_its_class_and_all_probabilities(
    packs: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS", 20)
    monkeypatch.setattr(module, "_SCORED", 3)
    model = classifier("single_label", family)
    expected, before = logits_of(model), model.config._attn_implementation
    truths = ["good", "bad", "bad", "fair", "good", "bad", "fair"]
    done: list[int] = []
    found = classify(model, rows(), truths, packs=packs, progress=done.append)
    assert found.labels == LabelSet("single_label", NAMES)
    assert [one.label for one in found.predictions] == [NAMES[number] for number in expected.argmax(1)]
    probabilities = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    np.testing.assert_allclose([one.probabilities for one in found.predictions], probabilities, rtol=1e-4, atol=1e-6)
    assert found.scores is not None
    ids = [NAMES.index(one) for one in truths]
    assert found.scores.metrics["accuracy"] == sk.accuracy_score(ids, expected.argmax(1))
    assert found.scores.metrics["eval_loss"] == pytest.approx(sk.log_loss(ids, probabilities), rel=1e-4)
    assert np.array_equal(found.scores.confusion, sk.confusion_matrix(ids, expected.argmax(1)))
    assert model.config._attn_implementation == before
    assert (done[-1], len(done) > 2) == (7, True)
    assert classify(model, rows(), packs=packs).scores is None
    # Rows that are known are not computed again, and count like the others; these are told apart from the model's.
    kept, fresh = {1: [4.0, 1.0, 0.0], 5: [0.0, 1.0, 3.0]}, dict[int, list[float]]()
    again = classify(model, rows(), truths, packs=packs, cached=kept, save=fresh.__setitem__)
    assert sorted(fresh) == [0, 2, 3, 4, 6]
    assert [one.label for one in again.predictions][1::4] == ["bad", "good"]
    said = [NAMES.index(str(one.label)) for one in again.predictions]
    assert again.scores is not None
    assert again.scores.metrics["accuracy"] == pytest.approx(sk.accuracy_score(ids, said))
    classify(model, rows(), truths, packs=packs, cached={**kept, **fresh}, save=lambda *_: 1 / 0)


def test_other_names_for_the_classes_and_no_rows_at_all() -> None:
    model = classifier("single_label")
    labels = LabelSet("single_label", ("x", "y", "z"))
    found = classify(model, rows(), packs=True, labels=labels)
    assert [one.label for one in found.predictions] == ["xyz"[number] for number in logits_of(model).argmax(1)]
    assert found.labels == labels
    empty = classify(model, [], [], packs=True)
    assert (empty.predictions, empty.scores) == ((), None)


def test_several_classes_and_numbers() -> None:
    model = classifier("multi_label")
    expected = logits_of(model)
    found = classify(model, rows(), [("bad",), (), *[("good", "fair")] * 5], packs=True)
    assert [one.label for one in found.predictions] == [
        tuple(name for name, logit in zip(NAMES, line, strict=True) if logit > 0) for line in expected
    ]
    np.testing.assert_allclose([one.probabilities for one in found.predictions], 1 / (1 + np.exp(-expected)), rtol=1e-4)
    numbers = classifier("regression")
    told = classify(numbers, rows(), [0.5] * 7, packs=True)
    np.testing.assert_allclose([one.label for one in told.predictions], logits_of(numbers)[:, 0], rtol=1e-4, atol=1e-5)
    assert all(one.probabilities == () for one in told.predictions)


def test_a_label_that_the_classifier_does_not_know_is_named_with_its_row() -> None:
    with pytest.raises(DataError, match="no label 'excellent'") as caught:
        classify(classifier("single_label"), rows(), ["good"] * 6 + ["excellent"], packs=True)
    assert caught.value.where == "row 6"
