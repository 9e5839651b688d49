"""What an evaluation makes of a judge's statistics: comparisons, overlap, notes, and what the results depend on."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.evaluation import compare
from finray.evaluation.compare import evaluate
from finray.evaluation.estimates import Judged, Loss
from finray.evaluation.harness import Found
from finray.evaluation.outcome import Comparison, Prediction, Rate
from finray.evaluation.overlap import Overlap
from finray.evaluation.scores.base import SummedScore
from finray.evaluation.statistics import interval, paired
from finray.evaluation.subjects import EvaluationRequest

RIGHT = {"small": [0.0] * 20, "large": [1.0] * 2 + [0.0] * 18, "tuned": [0.0] + [1.0] * 12 + [0.0] * 7}
NAMES = tuple(RIGHT)


class Rows:
    """Twenty of a hundred rows."""

    name, numbers = "eval", tuple(range(20, 40))
    split, dataset = range(100), SimpleNamespace(name="0a1b", content="c0de")

    def __init__(self, train: Any) -> None:
        self.train = train

    def __len__(self) -> int:
        return 20


def subject(name: str) -> Any:
    return SimpleNamespace(name=name, identity={"weights": f"of {name}"}, artifact=SimpleNamespace(folder=Path(name)))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    subjects = tuple(map(subject, NAMES))
    config = SimpleNamespace(
        data=SimpleNamespace(source="rows.jsonl"),
        evaluation=SimpleNamespace(max_rows=20),
        run=SimpleNamespace(seed=8),
    )
    case = SimpleNamespace(
        rows=Rows(train="what was trained on"),
        notes=["first", "second", "first"],
        rates=[Rate("tuned", "loss", 20, 100, 2.0)],
        spec=SimpleNamespace(name="causal_lm"),
        **{"config": config, "subjects": subjects, "tuned": subjects[-1], "folder": tmp_path, "dtype": torch.bfloat16},
    )
    answers = {name: {"exact": np.array(right)[:, None]} for name, right in RIGHT.items()}
    case.judged = Judged({"exact": SummedScore(), "loss": Loss()}, answers, {name: {} for name in NAMES})
    case.judged.harness = {
        name: {"t acc": Found(float(np.mean(RIGHT[name])), None, np.array(RIGHT[name])[:, None])} for name in NAMES
    }
    case.judged.made_by = {"engine": "an engine", "metrics": ["exact"]}
    case.judged.prediction = lambda index: Prediction(index, f"rows.jsonl:{index + 21}", "why", "so", {}, {})
    case.asked = {}

    def of(model: Any, overrides: Any, request: Any, **rest: Any) -> Any:
        case.asked |= {"model": model, "overrides": overrides, "request": request, **rest}
        case.request = request
        return case

    def overlap(*given: Any) -> Overlap:
        case.asked["overlap"] = given
        return Overlap((3,), (14,), ())

    monkeypatch.setattr(compare, "Case", SimpleNamespace(of=of))
    monkeypatch.setitem(compare.JUDGES, "causal_lm", lambda of: of.judged)
    monkeypatch.setattr(compare, "overlap", overlap)
    monkeypatch.setattr(compare, "load_tokenizer", lambda model: f"tokenizer of {model.name}")
    monkeypatch.setattr(compare, "Words", lambda tokenizer: f"words of {tokenizer}")
    return case


def put(case: Any, **request: Any) -> Comparison:
    return evaluate("a-model", ["a=b"], EvaluationRequest(**{"seed": 3, "output": case.folder, **request}))


def test_all_comparisons_count_for_each_other_also_those_of_lm_eval(case: Any) -> None:
    """Two baselines: the smaller of two p-values is doubled, and the other at least as large (Holm)."""
    found = put(case)
    exact, harness = ([one for one in found.compared if one.score == score] for score in ("exact", "t acc"))
    # The one has none of the 12 rows that `tuned` has right, the other one of them, and one that is wrong there.
    twice = [2 / 2**12, 2 * (1 + 12) / 2**12]
    for part in (exact, harness):
        assert [one.baseline for one in part] == ["small", "large"]
        assert [one.found.p for one in part] == pytest.approx([2 * twice[0], twice[1]])
    assert [line.partition(" (")[0] for line in found.sentences] == [
        "tuned is better than small on exact: by 60.0 points",
        "tuned is better than large on exact: by 50.0 points",
    ]


def test_scores_of_all_rows_and_of_those_that_were_not_trained_on(case: Any) -> None:
    found = put(case)
    assert [one.name for one in found.models] == [one.name for one in found.held_out] == list(NAMES)
    assert list(found.tuned.scores) == ["exact", "t acc"]
    assert found.tuned.metrics == {"exact": 0.6, "t acc": 0.6}
    # Of the rows 3 and 14, which are in the training data, the first is right.
    assert found.held_out[-1].metrics == {"exact": pytest.approx(11 / 18)}
    assert found.overlap == Overlap((3,), (14,), ())
    assert case.asked["overlap"] == (
        Rows.split,
        Rows.numbers,
        "what was trained on",
        "words of tokenizer of tuned",
    )
    assert (found.rows, [one.where for one in found.predictions][::19]) == (20, ["rows.jsonl:21", "rows.jsonl:40"])
    assert json.loads((case.folder / "metrics.json").read_text())["rows"] == 20
    assert (case.folder / "predictions.jsonl").read_text().count("\n") == 20


@pytest.mark.parametrize("rows", [(), range(20)])
def test_where_no_row_or_every_row_was_trained_on_there_are_no_scores_without_them(
    case: Any, monkeypatch: pytest.MonkeyPatch, rows: Any
) -> None:
    monkeypatch.setattr(compare, "overlap", lambda *_: Overlap(tuple(rows), (), ()))
    found = put(case)
    assert (found.held_out, found.overlap) == ((), Overlap(tuple(rows), (), ()))
    # The control: one row, and all but one.
    for some in ((4,), tuple(range(19))):
        monkeypatch.setattr(compare, "overlap", lambda *_, some=some: Overlap((), some, ()))
        assert len(put(case).held_out) == 3


def test_the_seed_draws_what_intervals_and_tests_need(case: Any) -> None:
    graded = {name: np.random.default_rng(at).random((20, 1)) for at, name in enumerate(NAMES)}
    for name, rows in graded.items():
        case.judged.statistics[name]["exact"] = rows
        case.judged.harness[name]["t acc"] = Found(float(rows.mean()), None, rows)
    mean = SummedScore().total
    found = {seed: put(case, seed=seed) for seed in (0, 3)}
    kept = np.array([index not in (3, 14) for index in range(20)])
    for seed, one in found.items():
        span = interval(graded["tuned"], mean, seed=seed)
        assert one.tuned.scores["exact"].interval == one.tuned.scores["t acc"].interval == span
        assert one.held_out[-1].scores["exact"].interval == interval(graded["tuned"][kept], mean, seed=seed)
        of_difference = paired(graded["large"], graded["tuned"], mean, seed=seed).interval
        assert [two.found.interval for two in one.compared if two.baseline == "large"] == [of_difference] * 2


def test_what_the_results_depend_on_is_recorded(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rouge_score", "sacrebleu", "lm_eval"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "sacrebleu", ModuleType("sacrebleu"))
    assert put(case).made_by == {
        "model": {"weights": "of tuned"},
        "baselines": {"small": {"weights": "of small"}, "large": {"weights": "of large"}},
        "data": {
            **{"source": "rows.jsonl", "split": "eval", "fingerprint": "0a1b", "content": "c0de"},
            **{"rows": 20, "of": 100, "max_rows": 20, "sample_seed": 8},
        },
        "dtype": "bfloat16",
        **{"engine": "an engine", "metrics": ["exact"]},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("finray", "torch", "transformers", "peft", "sacrebleu")},
        },
    }
    monkeypatch.setitem(sys.modules, "rouge_score", ModuleType("rouge_score"))
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    case.rows = None
    made_by = put(case).made_by
    assert made_by["data"] is None
    assert made_by["versions"] | {name: version(name) for name in ("rouge-score", "lm-eval")} == made_by["versions"]


def test_what_is_known_of_the_rows_is_said_once(case: Any) -> None:
    found = put(case)
    assert found.notes == ("first", "second")
    assert (found.rates, found.folder) == ((Rate("tuned", "loss", 20, 100, 2.0),), case.folder)
    case.rows, case.notes = Rows(train=None), []
    found = put(case)
    assert found.notes == ("the training data is unknown, so overlap with it was not checked",)
    assert (found.overlap, found.held_out) == (None, ())
    case.rows, case.notes = Rows(train="known"), []
    case.rows.name = "train"
    found = put(case)
    assert found.notes == ("the model was trained on these rows: their scores measure memorization",)
    assert (found.overlap, found.held_out) == (None, ())


def test_without_rows_there_are_the_scores_of_lm_eval_alone(case: Any) -> None:
    case.rows, case.notes = None, []
    case.judged.totals, case.judged.statistics = {}, {name: {} for name in NAMES}
    case.judged.prediction = None
    found = put(case)
    assert (found.rows, len(found.predictions), found.notes, found.overlap) == (0, 0, (), None)
    assert found.tuned.metrics == {"t acc": 0.6}
    assert found.tuned.scores["t acc"].interval.method == "Wilson"
    assert len(found.sentences) == 2
    # A classifier's rows have predictions, those that are learned as a whole have none.
    case.rows = Rows(train=None)
    assert len(put(case).predictions) == 0


@pytest.mark.parametrize(("output", "brought"), [(True, False), (False, True)])
def test_what_is_asked_for_is_handed_on_and_brought_back_where_no_other_place_is_named(
    case: Any, monkeypatch: pytest.MonkeyPatch, output: bool, brought: bool
) -> None:
    back: list[Any] = []
    monkeypatch.setattr(compare, "local_copy", lambda model: f"copy of {model}")
    monkeypatch.setattr(compare, "bring_back", lambda *given: back.append(given))
    request = EvaluationRequest(output=case.folder if output else None)
    told: Any = lambda what, done, *, total, rate="": None  # noqa: E731
    spread: Any = lambda: None  # noqa: E731
    evaluate("s3://b/run", ["a=b"], request, progress=told, spread=spread)
    assert back == [("s3://b/run", "copy of s3://b/run", case.folder)] * brought
    wanted = {"model": "copy of s3://b/run", "overrides": ["a=b"], "request": request, "tasks": compare.JUDGES}
    assert case.asked | wanted | {"progress": told, "spread": spread} == case.asked
