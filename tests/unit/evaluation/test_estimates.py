"""Statistics of rows become scores, comparisons and sentences: whose they are, over which rows, and what they claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finray.errors import ConfigError
from finray.evaluation.classifiers import Mean
from finray.evaluation.estimates import Judged, Loss, compared_with, directions, for_several, sentences
from finray.evaluation.harness import TaskMetric
from finray.evaluation.outcome import Compared, ModelScores, ScoreEstimate
from finray.evaluation.scores.base import OwnScore
from finray.evaluation.statistics import Interval, Paired

ROWS = 9
SHARE, ERROR = Mean(is_share=True), Mean(is_share=False, higher_is_better=False)


@pytest.fixture
def judged() -> Judged:
    random = np.random.default_rng(4)

    def drawn() -> Any:
        return random.random((ROWS, 1)) + 0.25

    tokens = random.integers(1, 9, (ROWS, 1)).astype(float)
    losses = {name: np.concatenate([drawn() * tokens, tokens], axis=1) for name in ("one", "two", "tuned")}
    # The first baseline's answers have other tokens.
    losses["one"][3] *= 2
    whole = ScoreEstimate(7.0, Interval(6.0, 8.0, "own"))
    statistics = {name: {"accuracy": drawn(), "error": drawn(), "loss": losses[name]} for name in losses}
    del statistics["two"]["error"]
    contrasts = {name: {"area": drawn()} for name in ("one", "tuned")}
    values = {"one": {}, "two": {"bleurt": whole}, "tuned": {"bleurt": whole, "area": replace(whole, value=0.5)}}
    totals = {"area": SHARE, "accuracy": SHARE, "error": ERROR, "loss": Loss()}
    return Judged(totals, statistics, values, contrasts=contrasts)  # type: ignore[arg-type]


def test_the_last_model_is_compared_with_each_other_on_what_both_have(judged: Judged) -> None:
    found = compared_with(judged, seed=6)
    names = [(one.baseline, one.score) for one in found]
    # Losses are compared where they are of the same tokens.
    assert names == [*(("one", score) for score in ("accuracy", "error", "area")), ("two", "accuracy"), ("two", "loss")]
    assert {one.rows for one in found} == {ROWS}
    areas = [judged.contrasts[name]["area"].mean() for name in ("one", "tuned")]
    assert found[2].test.difference == pytest.approx(areas[1] - areas[0])
    # The loss is per token, over all rows.
    sums = [judged.statistics[name]["loss"].sum(0) for name in ("two", "tuned")]
    assert found[4].test.difference == pytest.approx(sums[1][0] / sums[1][1] - sums[0][0] / sums[0][1])


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
        *(("f1", "one"), ("t acc", "one"), ("f1", "two"), ("bleu", "two"), ("t acc", "two"), ("f1", "three"))
    ]
    assert [one.test.p for one in found] == pytest.approx([0.03, 0.04, 0.06, 0.03, 0.04, 0.06])
    assert found[0].test == replace(compared("f1", "one", 0.01).test, p=found[0].test.p)


def model(name: str, *scores: str) -> ModelScores:
    return ModelScores(name, {score: ScoreEstimate(0.5, Interval(0.25, 0.75, "x"), True) for score in scores})


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


def told(name: str, **scores: float) -> ModelScores:
    found = {score: ScoreEstimate(value, Interval(None, None, "x")) for score, value in scores.items()}
    return ModelScores(name, found)


def test_where_it_is_not_known_what_is_better_the_sentence_does_not_judge(judged: Judged) -> None:
    """A word error rate that falls from 4.8 to 0 was called worse."""
    judged.totals["wer"] = OwnScore(lambda answers, references: [0.0], "my:wer")
    models = [told("one", wer=4.8), told("tuned", wer=0.0)]
    (found,) = sentences(models, [compared("wer", "one", 0.0001, -4.8)], judged)
    assert found == (
        "wer changed from 4.8 of one to 0 of tuned (95 % interval of the difference -5.05 to -4.55, p < 0.001, 40 "
        "rows). Whether more or less is better is not known: `higher_is_better` of the function says so."
    )
    assert directions(judged, "tuned")["wer"] is None


@pytest.mark.parametrize(("more", "word"), [(True, "worse"), (False, "better")])
def test_a_function_or_a_task_of_lm_eval_says_what_is_better(judged: Judged, more: bool, word: str) -> None:
    def wer(answers: list[str], references: list[str]) -> list[float]:
        return [0.0] * len(answers)

    wer.higher_is_better = more  # type: ignore[attr-defined]
    judged.totals["wer"] = OwnScore(wer, "my:wer")
    models = [told("one", wer=4.8), told("tuned", wer=0.0)]
    (found,) = sentences(models, [compared("wer", "one", 0.001, -4.8)], judged)
    assert found.startswith(f"tuned is {word} than one on wer: by 4.8")
    judged.harness["tuned"] = {"t wer": TaskMetric(0.0, None, None, more)}
    models = [told("one"), told("tuned", **{"t wer": 0.0})]
    (found,) = sentences(models, [compared("t wer", "one", 0.001, -4.8)], judged)
    assert found.startswith(f"tuned is {word} than one on t wer: by ")
    wer.higher_is_better = "no"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="must be True or False"):
        OwnScore(wer, "my:wer")


def test_where_the_first_score_says_nothing_the_sentence_names_what_did_change(judged: Judged) -> None:
    judged.totals["chars"] = OwnScore(lambda answers, references: [0.0], "my:chars")
    models = [
        told("one", accuracy=0.25, chars=12.0, loss=4.249, error=2.0),
        told("tuned", accuracy=0.3, chars=9.0, loss=2.53, error=2.1),
    ]
    changes = [
        compared("accuracy", "one", 0.4),
        compared("chars", "one", 0.01, -3.0),
        compared("loss", "one", 0.0001, -1.719),
        compared("error", "one", 0.3),
    ]
    (found,) = sentences(models, changes, judged)
    assert found.startswith("tuned and one cannot be told apart on accuracy from 40 rows: ")
    assert found.endswith(
        " What did change: chars from 12 to 9 (p = 0.01); loss from 4.249 to 2.53 (better, p < 0.001)."
    )
    (alone,) = sentences(models, [changes[0], changes[3]], judged)
    assert "What did change" not in alone
