"""Answers of all runs of a page, for ``answers.js``: one list of rows, with each model's answers.

Texts are stored once, because the base model gives the same answers in each run; and a page must stay small enough to
open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finray.config.tasks import mode_of
from finray.limits import cut
from finray.reporting.scored import AnsweredRow, Evaluation

# Maximum total length of texts on a page, escaped; with the curves of 20 runs it stays under 15 MB.
BUDGET = 7_000_000
# Maximum length of a text: tried in this order.
_LIMITS = (4000, 2000, 1000, 500, 250, 120)


@dataclass(frozen=True, slots=True)
class Explorer:
    """The data of the explorer of answers."""

    data: Mapping[str, Any]  # JSON types
    rows: tuple[int, int]  # number of rows included, and in total
    limit: int | None  # length to which longer texts were truncated; None if none was


def explorer(runs: Sequence[tuple[str, Sequence[Evaluation]]], *, budget: int = BUDGET) -> Explorer | None:
    """The answers of runs; None if there are none.

    Args:
        runs: names, each with the run's evaluations. Evaluations of the same name are merged row by row.
        budget: maximum total length of texts, escaped. Long texts are truncated first, then rows are dropped evenly.
    """
    several = len(runs) > 1
    models = list(
        dict.fromkeys(
            f"{run}: {model}" if several else model
            for run, evaluations in runs
            for evaluation in evaluations
            if evaluation.answered
            for model in evaluation.models
        )
    )
    names = list(
        dict.fromkeys(evaluation.name for _, evaluations in runs for evaluation in evaluations if evaluation.answered)
    )
    if not names:
        return None
    sets = [_Set(name, runs, models, several=several) for name in names]
    total = sum(len(answers.rows) for answers in sets)
    texts = {text for answers in sets for row in answers.rows for text in row.texts}
    longest = max(map(len, texts))
    limit = next((size for size in _LIMITS if _size(texts, size) <= budget), _LIMITS[-1])
    share = min(1.0, budget / max(1, _size(texts, limit)))
    if share < 1:
        for answers in sets:
            kept = max(1, int(len(answers.rows) * share))
            answers.rows = [answers.rows[number * len(answers.rows) // kept] for number in range(kept)]
    places: dict[str, int] = {}
    plain = [answers.plain(lambda text: places.setdefault(cut(text, limit), len(places))) for answers in sets]
    data = {"texts": list(places), "models": models, "sets": plain}
    return Explorer(data, (sum(len(answers.rows) for answers in sets), total), limit if longest > limit else None)


class _Row:
    def __init__(self, first: AnsweredRow) -> None:
        self.first = first
        self.answers: dict[int, str] = {}
        self.scores: dict[int, Mapping[str, float]] = {}

    @property
    def texts(self) -> list[str]:
        return [self.first.where, self.first.prompt, self.first.reference, *self.answers.values()]


class _Set:
    """The rows of evaluations of the same name, over all runs."""

    def __init__(
        self, name: str, runs: Sequence[tuple[str, Sequence[Evaluation]]], models: Sequence[str], *, several: bool
    ) -> None:
        self.name = name
        rows: dict[tuple[str, str], _Row] = {}
        scores: dict[str, None] = {}
        used: dict[int, None] = {}
        self.higher_is_better: dict[str, bool | None] = {}
        place = {model: number for number, model in enumerate(models)}
        for run, evaluations in runs:
            for part in (evaluation for evaluation in evaluations if evaluation.name == name and evaluation.answered):
                self.higher_is_better |= part.higher_is_better
                places = {model: place[f"{run}: {model}" if several else model] for model in part.models}
                used |= dict.fromkeys(places.values())
                for answered in part.answered:
                    row = rows.setdefault(answered.key, _Row(answered))
                    row.answers |= {
                        places[model]: texts for model, texts in answered.answers.items() if model in places
                    }
                    row.scores |= {places[model]: kept for model, kept in answered.scores.items() if model in places}
                    scores |= dict.fromkeys(score for kept in answered.scores.values() for score in kept)
        self.rows, self.scores, self.models = list(rows.values()), list(scores), sorted(used)

    def _is_less(self, score: str) -> bool | None:
        if score not in self.higher_is_better:
            return mode_of(score) == "min"
        more = self.higher_is_better[score]
        return None if more is None else not more

    def plain(self, place: Callable[[str], int]) -> dict[str, Any]:
        width = 1 + max(self.models, default=0)
        return {
            "name": self.name or "held-out rows",
            "models": self.models,
            "scores": self.scores,
            # Null where it is not known.
            "less": [self._is_less(score) for score in self.scores],
            "rows": [
                [
                    place(row.first.where),
                    place(row.first.prompt),
                    place(row.first.reference),
                    [place(row.answers[at]) if at in row.answers else -1 for at in range(width)],
                    [
                        [_short(row.scores[at].get(score)) for score in self.scores] if at in row.scores else None
                        for at in range(width)
                    ],
                ]
                for row in self.rows
            ],
        }


def _short(value: float | None) -> float | None:
    """Round a score to the displayed digits, to keep thousands of them small."""
    if value is None:
        return None
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _size(texts: Iterable[str], limit: int) -> int:
    """Length of texts on a page."""
    return sum(len(json.dumps(text[:limit])) + 5 * sum(map(text[:limit].count, "<>&'")) for text in texts)
