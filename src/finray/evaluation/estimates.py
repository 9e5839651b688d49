"""Scores of models with their intervals, what tells them apart, and in how many words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finray.evaluation.outcome import Compared, Estimate, Evaluated
from finray.evaluation.scores.base import FloatArray, Score, SummedScore
from finray.evaluation.statistics import Interval, adjusted, interval, paired, sentence


class Loss(SummedScore):
    """Nats per token: of each row, their sum and the number of tokens."""

    is_share, lower_is_better = False, True

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """The mean over tokens."""
        return float(sums_K[0] / sums_K[1])


def evaluated(
    name: str,
    order: list[str],
    totals: dict[str, Score],
    statistics: dict[str, dict[str, FloatArray]],
    values: dict[str, dict[str, float]],
    kept: Any,
    seed: int,
) -> Evaluated:
    """Scores of a model, of all rows or of those that are ``kept``."""
    found: dict[str, Estimate] = {}
    for score in (*order, "loss"):
        if (own := statistics[name].get(score)) is not None:
            own = own if kept is None else own[kept]
            value = totals[score].total(own.sum(0), len(own))
            found[score] = Estimate(value, interval(own, totals[score].total, seed=seed), totals[score].is_share)
        elif score in values.get(name, {}):
            none = Interval(None, None, "none: the function gives one number")
            found[score] = Estimate(values[name][score], none, 0 <= values[name][score] <= 1)
    return Evaluated(name, found)


def compared_with(
    models: Sequence[Evaluated], totals: dict[str, Score], statistics: dict[str, dict[str, FloatArray]], seed: int
) -> list[Compared]:
    """The last model against each other one, score by score; p is adjusted for several baselines."""
    tuned, found = models[-1].name, []
    for other in models[:-1]:
        for score, second in statistics[tuned].items():
            first = statistics[other.name].get(score)
            if first is None or (score == "loss" and not np.array_equal(first[:, 1], second[:, 1])):
                continue  # Losses of other tokens.
            found.append(Compared(score, other.name, len(first), paired(first, second, totals[score].total, seed=seed)))
    # Several baselines are several chances to find a difference.
    for score in {one.score for one in found}:
        own = [one for one in found if one.score == score]
        for one, p in zip(own, adjusted([one.found.p for one in own]), strict=True):
            found[found.index(one)] = replace(one, found=replace(one.found, p=p))
    return found


def sentences(models: Sequence[Evaluated], compared: Sequence[Compared], totals: dict[str, Score]) -> tuple[str, ...]:
    """A sentence for each baseline, about the first score that can be tested."""
    tuned = models[-1]
    first = next((name for name in tuned.scores if any(one.score == name for one in compared)), "")
    return tuple(
        sentence(
            one.found,
            name=tuned.name,
            other=one.baseline,
            score=first.replace("_", " "),
            rows=one.rows,
            shown=tuned.scores[first].difference,
            lower_is_better=first in totals and totals[first].lower_is_better,
        )
        for one in compared
        if one.score == first
    )
