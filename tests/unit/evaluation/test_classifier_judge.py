"""Classifiers side by side, with predictions made up here: who reads which rows, and what is said of each row."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finray.config.resolved import LabelSet
from finray.errors import ConfigError, DataError
from finray.evaluation import classifiers
from finray.evaluation.classifiers import commonest, judge
from finray.evaluation.classify import Classification, Classified
from finray.evaluation.outcome import Estimate, Rate
from finray.evaluation.statistics import Interval, interval
from finray.evaluation.subjects import EvaluationRequest

NAMES = ("a", "b", "c")
# By row of the split; rows 3, 0 and 1 are evaluated.
LABELS = ["a", "b", "c", "a"]
NUMBERS = (3, 0, 1)
SAID = {
    "base": [("b", (0.25, 0.5, 0.25)), ("a", (0.75, 0.125, 0.125)), ("b", (0.0, 1.0, 0.0))],
    "tuned": [("a", (0.5, 0.25, 0.25)), ("c", (0.125, 0.125, 0.75)), ("b", (0.25, 0.625, 0.125))],
}


# Of the first row alone the text is found again.
TEXTS = {"the config": {0: "The Source"}}


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
    request = EvaluationRequest(**changes.pop("request", {}))
    subjects = tuple(
        SimpleNamespace(name=name, artifact=SimpleNamespace(model=name, folder=name, notes={}), identity=name)
        for name in SAID
    )
    train = SimpleNamespace(labels=["c", "b", "c"])
    rows = SimpleNamespace(split=Split(), numbers=NUMBERS, train=train, fingerprint="rows", texts=TEXTS.get)
    # The baseline's tokenizer cuts the same rows otherwise.
    theirs = SimpleNamespace(split=Split(100), numbers=NUMBERS, fingerprint="theirs")
    return SimpleNamespace(
        **{
            "request": request,
            "rows": rows,
            "subjects": subjects,
            "tuned": subjects[-1],
            "rows_for": lambda artifact: rows if artifact is subjects[-1].artifact else theirs,
            "resolved": SimpleNamespace(label_set=LabelSet("single_label", NAMES)),
            "dtype": "bf16",
            "folder": None,
            "run": None,
            "spec": SimpleNamespace(name="sequence_classification"),
            "config": "the config",
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

    def classify(
        model: Any, rows: Any, truths: Any, *, packs: bool, labels: Any, progress: Any, kept: Any, keep: Any
    ) -> Classified:
        name = model
        assert kept == {}
        seen[name] = ([ids.tolist() for ids, _ in rows], truths, packs, labels)
        progress(2)
        metrics = {"accuracy": 0.5, "f1_macro": 0.25, "roc_auc": 0.5, "more": 0.75}
        scores: Any = SimpleNamespace(metrics=metrics, confusion=((1, 0), (0, 1)) if name == "tuned" else ())
        said = tuple(Classification(*one) for one in SAID[name])
        return Classified(LabelSet("single_label", NAMES), said, scores)

    monkeypatch.setattr(classifiers, "classify", classify)
    nothing = SimpleNamespace(found={}, adding=lambda *, made_by: nullcontext(lambda row, logits: None))
    monkeypatch.setattr(classifiers, "Kept", lambda folder, kind, belongs: nothing)
    loaded: Any = lambda artifact, *, dtype: SimpleNamespace(to=lambda device: artifact.model if dtype else None)  # noqa: E731
    monkeypatch.setattr(classifiers, "load_artifact", loaded)
    monkeypatch.setattr(classifiers, "packing_of", lambda model: SimpleNamespace(safe=model == "tuned"))
    words = SimpleNamespace(decode=lambda ids, *, skip_special_tokens: f"{ids} {skip_special_tokens}")
    monkeypatch.setattr(classifiers, "load_tokenizer", lambda model: words)
    return seen


def with_metrics(classify: Any, **more: float) -> Any:
    def changed(*given: Any, **options: Any) -> Classified:
        found = classify(*given, **options)
        found.scores.metrics.update(more)
        return found  # type: ignore[no-any-return]

    return changed


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
    assert judged.prediction(0).prompt == "The Source"
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


def test_a_class_that_is_never_predicted_is_said_and_a_class_has_its_rows(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAID, "tuned", [("a", (0.5, 0.25, 0.25)), ("c", (0.125, 0.125, 0.75)), ("a", (0.5, 0.5, 0.0))])
    monkeypatch.setattr(classifiers, "classify", with_metrics(classifiers.classify, recall_a=0.5))
    own = case()
    judged = judge(own)
    assert own.notes == ["tuned never predicts these classes (with their rows): b (1)"]
    assert judged.values["tuned"]["recall_a"].rows == 2
    assert judged.values["tuned"]["recall_a"].text().endswith("] of 2")


def test_the_commonest_label_stands_beside_only_where_no_baseline_is_named(asked: dict[str, Any]) -> None:
    assert list(judge(case(request={"baselines": ["base"]})).statistics) == ["base", "tuned"]
    untrained = case()
    untrained.rows.train = None
    assert list(judge(untrained).statistics) == ["base", "tuned"]


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        *[({"metrics": ["bleu"]}, "--metrics"), ({"harness": ["t"]}, "--harness"), ({"replicas": 2}, "--replicas")],
        *[({"engine": "vllm"}, "--engine"), ({"temperature": 0.5}, "--temperature"), ({"stop": ["."]}, "--stop")],
        *[({"max_new_tokens": 9}, "--max-new-tokens"), ({"top_p": 0.9}, "--top-p"), ({"top_k": 5}, "--top-k")],
        *[({"repetition_penalty": 1.1}, "--repetition-penalty"), ({"batch_size": 4}, "--batch-size")],
    ],
)
def test_what_only_models_that_write_can_do_is_refused(request_: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match="predicts labels") as caught:
        judge(case(request=request_))
    assert caught.value.where == where


def test_options_that_are_empty_ask_for_nothing(asked: dict[str, Any]) -> None:
    assert judge(case(request={"metrics": [], "stop": [], "harness": []})).statistics


@pytest.mark.parametrize(("most", "has_intervals"), [(27, True), (26, False)])
def test_scores_of_more_classes_and_rows_than_fit_have_no_intervals_and_that_is_said(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, most: int, has_intervals: bool
) -> None:
    """Three rows of three classes are three matrices of nine numbers."""
    monkeypatch.setattr(classifiers, "_MOST_NUMBERS", most)
    own = case()
    judged = judge(own)
    assert ("f1_macro" in judged.totals) == ("f1_macro" in judged.statistics["tuned"]) == has_intervals
    assert own.notes == (
        [] if has_intervals else ["3 classes are too many: F1, precision and recall have no intervals"]
    )
    if not has_intervals:
        none = Interval(None, None, "none: there are too many classes and rows")
        assert judged.values["tuned"]["f1_macro"] == Estimate(0.25, none)
        assert list(judged.totals) == ["accuracy", "eval_loss", "roc_auc", "spearman"]


@pytest.mark.parametrize("seed", [0, 5])
def test_numbers_have_an_error_and_correlations_with_their_intervals(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    truths = [1.0, 2.5, 3.0, 0.5, 4.0, 2.0]
    said = {"base": [2.0, 2.25, 2.5, 1.0, 1.5, 3.0], "tuned": [1.25, 2.0, 3.5, 0.25, 3.0, 2.75]}
    metrics = {"eval_loss": 0.5, "mean_squared_error": 0.5, "pearson": 0.75, "spearman": 0.8}

    def classify(model: Any, *_: Any, **__: Any) -> Classified:
        found: Any = SimpleNamespace(metrics=metrics, confusion=())
        return Classified(LabelSet("regression", ()), tuple(map(Classification, said[model])), found)

    monkeypatch.setattr(classifiers, "classify", classify)
    monkeypatch.setattr(Split, "labels", truths)
    own = case(request={"seed": seed}, resolved=None)
    own.rows.numbers, own.rows.train = range(6), SimpleNamespace(labels=[1.0, 4.0])
    judged = judge(own)
    assert own.notes == []
    assert list(judged.totals) == ["mean_squared_error", "pearson", "roc_auc", "spearman"]
    assert (judged.classes, judged.confusion) == ((), {})
    errors = (np.array(said["tuned"]) - truths) ** 2
    assert judged.statistics["tuned"]["mean_squared_error"][:, 0].tolist() == pytest.approx(errors.tolist())
    assert judged.statistics["commonest"].keys() == {"mean_squared_error"}, "equal numbers have no correlation"
    values = judged.values["tuned"]
    assert values["eval_loss"] == Estimate(
        0.5,
        interval(errors[:, None], lambda sums, rows: float(sums[0]) / rows, seed=seed, bounds=(0.0, None)),
        is_share=False,
    )
    reach = 1.959964 * np.sqrt((1 + 0.8**2 / 2) / 3)
    assert values["spearman"].interval.low == pytest.approx(np.tanh(np.arctanh(0.8) - reach), rel=1e-5)
    assert values.keys() == {"eval_loss", "spearman"}
    assert judged.contrasts["tuned"].keys() == judged.contrasts["base"].keys() == {"spearman"}
    assert judged.contrasts["commonest"] == {}
    assert judged.prediction is not None
    one = judged.prediction(3)
    assert (one.reference, one.answers) == ("0.5", {"commonest": ["2.5"], "base": ["1"], "tuned": ["0.25"]})
    assert one.scores["tuned"] == {"mean_squared_error": pytest.approx(0.0625)}


def test_an_area_has_delongs_interval_of_its_own_model(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = {"base": [0.5, 0.25, 0.75, 0.375, 0.625, 0.125], "tuned": [0.75, 0.25, 0.5, 0.125, 0.5625, 0.625]}
    truths = ["yes", "no", "yes", "no", "no", "yes"]

    def classify(model: Any, *_: Any, **__: Any) -> Classified:
        said = tuple(Classification("yes", (1 - one, one)) for one in probabilities[model])
        scores: Any = SimpleNamespace(metrics={"roc_auc": {"base": 5 / 9, "tuned": 8 / 9}[model]}, confusion=())
        return Classified(LabelSet("single_label", ("no", "yes")), said, scores)

    monkeypatch.setattr(classifiers, "classify", classify)
    monkeypatch.setattr(Split, "labels", truths)
    own = case(resolved=None)
    own.rows.numbers, own.rows.train = range(6), SimpleNamespace(labels=["yes", "no", "yes"])
    judged = judge(own)
    right = np.array(truths) == "yes"
    for name, area in (("base", 5 / 9), ("tuned", 8 / 9)):
        scores = np.array(probabilities[name])
        won = (scores[right][:, None] > scores[~right]).astype(float)
        error = np.sqrt(won.mean(1).var(ddof=1) / 3 + won.mean(0).var(ddof=1) / 3)
        assert won.mean() == pytest.approx(area)
        estimate = judged.values[name]["roc_auc"]
        assert estimate.interval.method == "DeLong"
        odds = area / (1 - area) * np.exp(np.array([-1.959964, 1.959964]) * error / (area * (1 - area)))
        ends = (estimate.interval.low, estimate.interval.high)
        assert ends == pytest.approx(tuple(odds / (1 + odds)), rel=1e-5)
    # All are alike for who says the same of every row.
    assert judged.contrasts["commonest"] == {}


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
    found = classifiers._contrasts(labels, truths, predicted)["roc_auc"]
    assert found.shape == (7, 1)
    assert found.mean() == pytest.approx(np.mean(areas))


def test_the_area_of_two_classes_is_that_of_the_second() -> None:
    """Its probabilities are told apart where those of the first are all one."""
    said = [("yes", 1e-9), ("no", 1e-12), ("yes", 1e-3), ("no", 1e-10), ("no", 0.5), ("yes", 1e-11)]
    predicted = [Classification("no", (float(np.float32(1 - one)), one)) for _, one in said]
    found = classifiers._contrasts(LabelSet("single_label", ("no", "yes")), [name for name, _ in said], predicted)
    # Of nine pairs, 1e-9 and 1e-3 are above two each, and 1e-11 is above one.
    assert found["roc_auc"].mean() == pytest.approx(5 / 9)


def test_a_loss_of_what_was_thought_impossible_is_finite() -> None:
    truth = np.array([[True, False], [True, False]])
    single = classifiers._losses(truth, np.array([[0.0, 1.0], [0.25, 0.75]]), True)
    assert single[:, 0].tolist() == pytest.approx([300 * np.log(10), np.log(4)])
    several = classifiers._losses(truth, np.array([[0.0, 1.0], [0.25, 0.0]]), False)
    assert several[:, 0].tolist() == pytest.approx([16 * np.log(10), np.log(4) / 2])


@pytest.mark.parametrize(
    ("label", "shown"), [("a", "a"), (("a", "b"), "a, b"), ((), ""), (0.123456, "0.1235"), (2.0, "2"), (1e6, "1e+06")]
)
def test_labels_as_they_are_shown(label: Any, shown: str) -> None:
    assert classifiers._shown(label) == shown


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
