"""Classifiers side by side, with predictions made up here: who reads which rows, and what is said of each row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finray.config.resolved import LabelSet
from finray.errors import ConfigError, DataError
from finray.evaluation import classifiers
from finray.evaluation.classifiers import commonest, judge
from finray.evaluation.classify import Classification, Classified
from finray.evaluation.outcome import Rate

NAMES = ("a", "b", "c")
# By row of the split; rows 3, 0 and 1 are evaluated.
LABELS = ["a", "b", "c", "a"]
NUMBERS = (3, 0, 1)
SAID = {
    "base": [("b", (0.25, 0.5, 0.25)), ("a", (0.75, 0.125, 0.125)), ("b", (0.0, 1.0, 0.0))],
    "tuned": [("a", (0.5, 0.25, 0.25)), ("c", (0.125, 0.125, 0.75)), ("b", (0.25, 0.625, 0.125))],
}


class Split:
    labels = LABELS

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def row(self, number: int) -> tuple[Any, Any]:
        ids = np.arange(self.first, self.first + number + 1)
        return ids, np.zeros(len(ids))

    def where(self, number: int) -> str:
        return f"rows.jsonl:{number + 1}"


def case(**changes: Any) -> Any:
    request = {
        "metrics": None,
        "harness": (),
        "replicas": 1,
        "baselines": None,
        "seed": 0,
        **changes.pop("request", {}),
    }
    subjects = tuple(SimpleNamespace(name=name, artifact=SimpleNamespace(model=name, folder=name)) for name in SAID)
    train = SimpleNamespace(labels=["c", "b", "c"])
    rows = SimpleNamespace(split=Split(), numbers=NUMBERS, train=train)
    # The baseline's tokenizer cuts the same rows otherwise.
    theirs = SimpleNamespace(split=Split(100), numbers=NUMBERS)
    return SimpleNamespace(
        **{
            "request": SimpleNamespace(**request),
            "rows": rows,
            "subjects": subjects,
            "tuned": subjects[-1],
            "rows_for": lambda artifact: rows if artifact is subjects[-1].artifact else theirs,
            "resolved": SimpleNamespace(label_set=LabelSet("single_label", NAMES)),
            "dtype": "bf16",
            "progress": lambda what, done, *, total: None,
            "notes": [],
            "rates": [],
            **changes,
        }
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each model was asked to classify; and in `scores`, whether there are any."""
    seen: dict[str, Any] = {}

    def classify(model: Any, rows: Any, truths: Any, *, packs: bool, labels: Any, progress: Any) -> Classified:
        name = model
        seen[name] = ([ids.tolist() for ids, _ in rows], truths, packs, labels)
        progress(2)
        metrics = {"accuracy": 0.5, "f1_macro": 0.25, "roc_auc": 0.5, "more": 0.75}
        scores: Any = SimpleNamespace(metrics=metrics, confusion=((1, 0), (0, 1)) if name == "tuned" else ())
        said = tuple(Classification(*one) for one in SAID[name])
        return Classified(LabelSet("single_label", NAMES), said, scores)

    monkeypatch.setattr(classifiers, "classify", classify)
    loaded: Any = lambda artifact, *, dtype: SimpleNamespace(to=lambda device: artifact.model if dtype else None)  # noqa: E731
    monkeypatch.setattr(classifiers, "load_artifact", loaded)
    monkeypatch.setattr(classifiers, "packing_of", lambda model: SimpleNamespace(safe=model == "tuned"))
    words = SimpleNamespace(decode=lambda ids, *, skip_special_tokens: f"{ids} {skip_special_tokens}")
    monkeypatch.setattr(classifiers, "load_tokenizer", lambda model: words)
    return seen


def test_each_model_reads_its_own_rows_and_the_evaluated_one_knows_its_labels(asked: dict[str, Any]) -> None:
    progress: list[Any] = []
    own = case(progress=lambda what, done, *, total: progress.append((what, done, total)))
    judge(own)
    assert own.notes == []
    truths = ["a", "a", "b"]
    assert asked == {
        "base": ([[100, 101, 102, 103], [100], [100, 101]], truths, False, None),
        "tuned": ([[0, 1, 2, 3], [0], [0, 1]], truths, True, LabelSet("single_label", NAMES)),
    }
    assert progress == [("base labels", 2, 3), ("tuned labels", 2, 3)]
    assert [(one.model, one.part, one.rows, one.tokens) for one in own.rates] == [
        ("base", "labels", 3, 7),
        ("tuned", "labels", 3, 7),
    ]
    assert all(isinstance(one, Rate) and 0 <= one.seconds < 60 for one in own.rates)
    asked.clear()
    judge(case(resolved=None))
    assert asked["tuned"][3] is None


def test_a_row_has_each_models_label_and_how_sure_it_is(asked: dict[str, Any]) -> None:
    judged = judge(case())
    assert judged.classes == NAMES
    assert judged.confusion == {"tuned": ((1, 0), (0, 1))}
    assert judged.prediction is not None
    one = judged.prediction(1)
    assert (one.row, one.where, one.prompt, one.reference) == (0, "rows.jsonl:1", "[0] True", "a")
    assert one.answers == {"commonest": ["c"], "base": ["a"], "tuned": ["c"]}
    assert one.scores == {
        "commonest": {"accuracy": 0.0},
        "base": {"accuracy": 1.0, "eval_loss": pytest.approx(-np.log(0.75)), "probability": 0.75},
        "tuned": {"accuracy": 0.0, "eval_loss": pytest.approx(-np.log(0.125)), "probability": 0.75},
    }
    # What has statistics of rows is estimated from these; the rest is the model's own value.
    assert list(judged.statistics) == ["commonest", "base", "tuned"]
    assert judged.statistics["tuned"]["accuracy"][:, 0].tolist() == [1.0, 0.0, 1.0]
    # Of the nine cells of true and predicted class, the one that a row is in.
    cells = judged.statistics["tuned"]["f1_macro"]
    assert (cells.shape, cells.argmax(1).tolist(), cells.sum(1).tolist()) == ((3, 9), [0, 2, 4], [1.0, 1.0, 1.0])
    assert set(judged.values["tuned"]) == {"roc_auc", "more"}
    assert judged.values["tuned"]["more"].value == 0.75
    assert judged.values["tuned"]["more"].interval.low is None
    assert judged.values["commonest"] == {}


def test_the_commonest_label_stands_beside_only_where_no_baseline_is_named(asked: dict[str, Any]) -> None:
    assert list(judge(case(request={"baselines": ["base"]})).statistics) == ["base", "tuned"]
    untrained = case()
    untrained.rows.train = None
    assert list(judge(untrained).statistics) == ["base", "tuned"]


@pytest.mark.parametrize(
    ("request_", "where"),
    [({"metrics": ["bleu"]}, "--metrics"), ({"harness": ["t"]}, "--harness"), ({"replicas": 2}, "--replicas")],
)
def test_what_only_models_that_write_can_do_is_refused(request_: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match="predicts labels") as caught:
        judge(case(request=request_))
    assert caught.value.where == where


def test_a_baseline_with_other_labels_is_named(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAID, "base", [("d", (0.5, 0.25, 0.25))] * 3)
    with pytest.raises(DataError, match=r"`base` predicts 'd', but the classes are a, b, c"):
        judge(case())


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
