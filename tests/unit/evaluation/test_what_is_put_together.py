"""What an evaluation makes of a judge's statistics: comparisons, overlap, notes, and what the results depend on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.requests import EvaluationRequest
from finray.evaluation import compare
from finray.evaluation.compare import evaluate
from finray.evaluation.estimates import Judged, Loss
from finray.evaluation.harness import TaskMetric
from finray.evaluation.outcome import Comparison, Prediction, Rate
from finray.evaluation.overlap import Overlap
from finray.evaluation.scores.base import SummedScore

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
        data=SimpleNamespace(source="rows.jsonl"), evaluation=SimpleNamespace(max_rows=20), run=SimpleNamespace(seed=8)
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
        name: {"t acc": TaskMetric(float(np.mean(RIGHT[name])), None, np.array(RIGHT[name])[:, None])} for name in NAMES
    }
    case.judged.made_by = {"engine": "an engine", "metrics": ["exact"]}
    case.judged.prediction = lambda index: Prediction(index, f"rows.jsonl:{index + 21}", "why", "so", {}, {})
    monkeypatch.setattr(compare, "Case", SimpleNamespace(of=lambda *given, **options: case))
    monkeypatch.setitem(compare.JUDGES, "causal_lm", lambda of: of.judged)
    monkeypatch.setattr(compare, "overlap", lambda *given: Overlap((3,), (14,), ()))
    monkeypatch.setattr(compare, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(compare, "Words", lambda tokenizer: None)
    return case


def put(case: Any) -> Comparison:
    return evaluate("a-model", [], EvaluationRequest(seed=3, output=case.folder))


def test_all_comparisons_count_for_each_other_also_those_of_lm_eval(case: Any) -> None:
    """Two baselines: the smaller of two p-values is doubled, and the other at least as large (Holm)."""
    found = put(case)
    exact, harness = ([one for one in found.compared if one.score == score] for score in ("exact", "t acc"))
    # The one has none of the 12 rows that `tuned` has right, the other one of them, and one that is wrong there.
    twice = [2 / 2**12, 2 * (1 + 12) / 2**12]
    for part in (exact, harness):
        assert [one.baseline for one in part] == ["small", "large"]
        assert [one.test.p for one in part] == pytest.approx([2 * twice[0], twice[1]])
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
