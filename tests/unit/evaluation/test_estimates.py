"""Statistics of rows become scores, comparisons and sentences: whose they are, over which rows, and what they claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finray.evaluation.classifiers import Mean
from finray.evaluation.estimates import Judged, Loss, compared_with, evaluated, for_several, sentences
from finray.evaluation.harness import Found
from finray.evaluation.outcome import Compared, Estimate, Evaluated
from finray.evaluation.statistics import Interval, Paired, interval, paired

ROWS = 9
SHARE, ERROR = Mean(is_share=True), Mean(is_share=False, lower_is_better=True)


@pytest.fixture
def judged() -> Judged:
    random = np.random.default_rng(4)

    def drawn() -> Any:
        return random.random((ROWS, 1)) + 0.25

    tokens = random.integers(1, 9, (ROWS, 1)).astype(float)
    losses = {name: np.concatenate([drawn() * tokens, tokens], axis=1) for name in ("one", "two", "tuned")}
    # The first baseline's answers have other tokens.
    losses["one"][3] *= 2
    whole = Estimate(7.0, Interval(6.0, 8.0, "own"))
    statistics = {name: {"accuracy": drawn(), "error": drawn(), "loss": losses[name]} for name in losses}
    del statistics["two"]["error"]
    contrasts = {name: {"area": drawn()} for name in ("one", "tuned")}
    values = {"one": {}, "two": {"bleurt": whole}, "tuned": {"bleurt": whole, "area": replace(whole, value=0.5)}}
    totals = {"area": SHARE, "accuracy": SHARE, "error": ERROR, "loss": Loss()}
    return Judged(totals, statistics, values, contrasts=contrasts)  # type: ignore[arg-type]


def test_the_loss_is_per_token_of_all_rows_and_less_is_better() -> None:
    assert Loss().total(np.array([7.5, 3.0]), 2) == 2.5
    assert (Loss().is_share, Loss().lower_is_better) == (False, True)


@pytest.mark.parametrize("seed", [0, 6])
def test_scores_of_a_model_are_those_of_its_rows_and_its_own_values(judged: Judged, seed: int) -> None:
    found = evaluated(judged, "tuned", seed=seed)
    own = judged.statistics["tuned"]
    sums = own["loss"].sum(0)
    assert found.name == "tuned"
    assert list(found.scores) == ["area", "accuracy", "error", "loss", "bleurt"]
    assert found.scores["loss"] == Estimate(sums[0] / sums[1], interval(own["loss"], Loss().total, seed=seed), False)
    assert found.scores["accuracy"].value == pytest.approx(own["accuracy"].mean())
    assert found.scores["accuracy"].interval == interval(own["accuracy"], SHARE.total, seed=seed)
    assert [found.scores[name].is_share for name in ("accuracy", "error")] == [True, False]
    assert (found.scores["bleurt"], found.scores["area"].value) == (judged.values["tuned"]["bleurt"], 0.5)
    assert list(evaluated(judged, "two", seed=seed).scores) == ["accuracy", "loss", "bleurt"]
    assert list(evaluated(judged, "one", seed=seed).scores) == ["accuracy", "error", "loss"]


def test_scores_of_some_rows_are_those_of_these_rows_alone(judged: Judged) -> None:
    kept = np.arange(ROWS) % 3 > 0
    found = evaluated(judged, "tuned", seed=2, kept=kept)
    # What is no sum over rows has no value for some of them.
    assert list(found.scores) == ["accuracy", "error", "loss"]
    part = judged.statistics["tuned"]["loss"][kept]
    assert found.loss == pytest.approx(part[:, 0].sum() / part[:, 1].sum())
    assert found.scores["loss"].interval == interval(part, Loss().total, seed=2)
    assert found.scores["accuracy"].value == pytest.approx(judged.statistics["tuned"]["accuracy"][kept].mean())


def test_scores_of_one_row_are_those_with_a_single_number(judged: Judged) -> None:
    found = judged.of_row(4)
    assert list(found) == ["one", "two", "tuned"]
    assert list(found["two"]) == ["accuracy"]
    own = judged.statistics["tuned"]
    assert found["tuned"] == {name: own[name][4, 0] for name in ("accuracy", "error")}


@pytest.mark.parametrize("seed", [0, 6])
def test_the_last_model_is_compared_with_each_other_on_what_both_have(judged: Judged, seed: int) -> None:
    found = compared_with(judged, seed=seed)
    names = [(one.baseline, one.score) for one in found]
    # Losses are compared where they are of the same tokens.
    assert names == [*(("one", score) for score in ("accuracy", "error", "area")), ("two", "accuracy"), ("two", "loss")]
    assert {one.rows for one in found} == {ROWS}
    for one in found:
        first, second = (
            (judged.statistics[name] | judged.contrasts.get(name, {}))[one.score] for name in (one.baseline, "tuned")
        )
        assert one.found == paired(first, second, judged.totals[one.score].total, seed=seed)


def compared(score: str, baseline: str, p: float, difference: float = 0.5) -> Compared:
    span = Interval(difference - 0.25, difference + 0.25, "x")
    return Compared(score, baseline, 40, Paired(difference, span, p, "y"))


def test_p_of_several_baselines_is_holms_for_each_score_alone() -> None:
    """Also of a metric of lm-eval, and whatever stands between its comparisons."""
    found = for_several(
        [
            compared("f1", "one", 0.01),
            compared("t acc", "one", 0.02),
            compared("f1", "two", 0.04),
            compared("bleu", "two", 0.03),
            compared("t acc", "two", 0.03),
            compared("f1", "three", 0.03),
        ]
    )
    assert [(one.score, one.baseline) for one in found] == [
        *(("f1", "one"), ("t acc", "one"), ("f1", "two"), ("bleu", "two"), ("t acc", "two"), ("f1", "three")),
    ]
    assert [one.found.p for one in found] == pytest.approx([0.03, 0.04, 0.06, 0.03, 0.04, 0.06])
    assert found[0].found == replace(compared("f1", "one", 0.01).found, p=found[0].found.p)


def model(name: str, *scores: str) -> Evaluated:
    return Evaluated(name, {score: Estimate(0.5, Interval(0.25, 0.75, "x"), True) for score in scores})


def test_there_is_a_sentence_for_each_baseline_about_the_first_score_that_is_compared(judged: Judged) -> None:
    models = [model("one", "error"), model("tuned", "bleurt", "mean_error", "accuracy")]
    judged.totals["mean_error"] = ERROR
    found = sentences(
        models,
        [compared("accuracy", "one", 0.001), compared("mean_error", "one", 0.001), compared("mean_error", "two", 0.5)],
        judged,
    )
    assert [line.partition(": ")[0] for line in found] == [
        "tuned is worse than one on mean error",
        "tuned and two cannot be told apart on mean error from 40 rows",
    ]
    assert "by 50.0 points (95 % interval of the gain -75.0 points to -25.0 points, p = 0.001, 40 rows)" in found[0]
    assert sentences(models, [], judged) == ()
    (better,) = sentences(models, [compared("accuracy", "one", 0.001)], judged)
    assert better.startswith("tuned is better than one on accuracy: ")


@pytest.mark.parametrize(("less", "word"), [(True, "worse"), (False, "better")])
def test_a_metric_of_lm_eval_is_better_the_less_it_is_where_its_task_says_so(
    judged: Judged, less: bool, word: str
) -> None:
    judged.harness["tuned"] = {"crows_pairs likelihood_diff": Found(0.5, None, None, less)}
    models = [model("one"), model("tuned", "crows_pairs likelihood_diff")]
    (found,) = sentences(models, [compared("crows_pairs likelihood_diff", "one", 0.001)], judged)
    assert found.startswith(f"tuned is {word} than one on crows pairs likelihood diff: by ")
