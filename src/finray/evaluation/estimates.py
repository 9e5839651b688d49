"""Scores of models with their intervals and comparisons, and the sentence that states the conclusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.evaluation.harness import TaskMetric
from finray.evaluation.outcome import Compared, ModelScores, Prediction, ScoreEstimate
from finray.evaluation.scores.base import Bounds, FloatArray, Score, SummedScore, bounds_of
from finray.evaluation.statistics import adjusted, are_apart, change, interval, paired, sentence

# That are named where the first score says nothing.
_CHANGES = 3


class Loss(SummedScore):
    """Loss in nats per token: from each row's sum and number of tokens."""

    is_share = False
    higher_is_better: bool | None = False
    bounds: Bounds | None = (0.0, None)

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """The mean over tokens."""
        return float(sums_K[0] / sums_K[1])


class Mean(SummedScore):
    """A mean over the rows."""

    def __init__(
        self, bounds: Bounds | None = None, *, is_share: bool = False, higher_is_better: bool | None = True
    ) -> None:
        super().__init__()
        self.bounds, self.is_share, self.higher_is_better = bounds, is_share, higher_is_better


@dataclass(slots=True)
class Judged:
    """Results of models on the rows; by model name, the evaluated one last."""

    totals: dict[str, Score]  # scores by name, in the order of display
    statistics: dict[str, dict[str, FloatArray]]  # by model and score (N, K)
    values: dict[str, dict[str, ScoreEstimate]]  # by model, scores that are not sums over rows
    # A row and the answers to it, by index; None if there are no answers.
    prediction: Callable[[int], Prediction] | None = None
    classes: tuple[str, ...] = ()  # of a classifier, by id
    # By model, rows by their class and the predicted one, if each row has one class.
    confusion: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    harness: dict[str, dict[str, TaskMetric]] = field(default_factory=dict)  # by model, metrics of lm-eval tasks
    # Versions and settings that it depends on, besides models and data.
    made_by: dict[str, Any] = field(default_factory=dict)
    # By model and score, numbers of all rows (N, K) by which models are compared where the score is no sum over rows.
    contrasts: dict[str, dict[str, FloatArray]] = field(default_factory=dict)
    # By model and score, how the checks of answers ended.
    counts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def of_row(self, index: int) -> dict[str, dict[str, float]]:
        """By model, the scores of one row that are numbers."""
        return {
            model: {
                name: float(scores[name][index, 0])
                for name in self.totals
                if name in scores and scores[name].shape[1] == 1
            }
            for model, scores in self.statistics.items()
        }


def evaluated(judged: Judged, model: str, *, seed: int, kept: npt.NDArray[np.bool_] | None = None) -> ModelScores:
    """Scores of a model, over all rows or those that are ``kept``."""
    scores: dict[str, ScoreEstimate] = {}
    values = judged.values[model] if kept is None else {}
    for name in dict.fromkeys((*judged.totals, *values)):
        if (statistics_NK := judged.statistics[model].get(name)) is not None:
            statistics_NK, score = statistics_NK if kept is None else statistics_NK[kept], judged.totals[name]
            value = score.total(statistics_NK.sum(0), len(statistics_NK))
            span = interval(statistics_NK, score.total, seed=seed, bounds=bounds_of(score))
            counts = judged.counts.get(model, {}).get(name, {}) if kept is None else {}
            scores[name] = ScoreEstimate(value, span, score.is_share, counts)
        elif name in values:
            scores[name] = values[name]
    return ModelScores(model, scores)


def compared_with(judged: Judged, *, seed: int) -> list[Compared]:
    """The last model against each other one, score by score."""
    (*others, tuned), comparisons = judged.statistics, []
    for other in others:
        second_of = judged.statistics[tuned] | judged.contrasts.get(tuned, {})
        first_of = judged.statistics[other] | judged.contrasts.get(other, {})
        for score, second in second_of.items():
            first = first_of.get(score)
            if first is None or (score == "loss" and not np.array_equal(first[:, 1], second[:, 1])):
                continue  # Losses of other tokens.
            total = judged.totals[score]
            test = paired(first, second, total.total, seed=seed, bounds=bounds_of(total))
            comparisons.append(Compared(score, other, len(first), test))
    return comparisons


def for_several(compared: Sequence[Compared]) -> list[Compared]:
    """The comparisons with p adjusted, score by score: several baselines are several chances to find a difference."""
    comparisons = list(compared)
    for score in {comparison.score for comparison in comparisons}:
        places = [place for place, comparison in enumerate(comparisons) if comparison.score == score]
        for place, p in zip(places, adjusted([comparisons[place].test.p for place in places]), strict=True):
            comparisons[place] = replace(comparisons[place], test=replace(comparisons[place].test, p=p))
    return comparisons


def directions(judged: Judged, model: str) -> dict[str, bool | None]:
    """By score of a model, whether more of it is better; None where that is not known."""
    scores: dict[str, Score | TaskMetric] = {**judged.totals, **judged.harness.get(model, {})}
    return {name: getattr(score, "higher_is_better", None) for name, score in scores.items()}


def sentences(models: Sequence[ModelScores], compared: Sequence[Compared], judged: Judged) -> tuple[str, ...]:
    """A sentence for each baseline, about the first score that can be tested; and about the others where that one says
    nothing."""
    tuned, by_name = models[-1], {model.name: model for model in models}
    first = next((name for name in tuned.scores if any(comparison.score == name for comparison in compared)), "")
    is_better = directions(judged, tuned.name)

    def values(comparison: Compared) -> tuple[str, str]:
        before, after = (by_name[name].scores[comparison.score] for name in (comparison.baseline, tuned.name))
        return before.text(with_interval=False), after.text(with_interval=False)

    lines = []
    for comparison in (each for each in compared if each.score == first):
        better = is_better.get(first)
        text = sentence(
            comparison.test,
            name=tuned.name,
            other=comparison.baseline,
            score=first.replace("_", " "),
            rows=comparison.rows,
            shown=tuned.scores[first].difference,
            higher_is_better=better,
            values=("", "") if better is not None else values(comparison),
        )
        if not are_apart(comparison.test):
            others = [each for each in compared if each.baseline == comparison.baseline and are_apart(each.test)]
            changes = [
                change(each.test, each.score.replace("_", " "), values(each), is_better.get(each.score))
                for each in others[:_CHANGES]
            ]
            text += f" What did change: {'; '.join(changes)}." if changes else ""
        lines.append(text)
    return tuple(lines)
