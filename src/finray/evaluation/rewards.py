"""The judge of reward models: how good each answer is; of pairs, how often and how far the chosen one is ahead."""

from __future__ import annotations

import numpy as np

from finray.config.resolved import REWARD
from finray.data.sampling.collate import Row
from finray.errors import ModelError
from finray.evaluation import pairs
from finray.evaluation.answers import shown
from finray.evaluation.classifiers import classified_rows, require_no_answers
from finray.evaluation.estimates import Judged, Mean
from finray.evaluation.labels import ending
from finray.evaluation.scores.base import FloatArray, Score
from finray.evaluation.subjects import Case, Subject

# By name, in the order of display; of answers that are no pairs the last alone.
SCORES: dict[str, Score] = {name: pairs.SCORES[name] for name in ("reward_accuracy", "reward_margin")}
SCORES |= dict.fromkeys(("chosen_reward", "rejected_reward", "reward"), Mean(higher_is_better=None))


def judge(case: Case) -> Judged:
    """Score answers with reward models.
    Raises FinrayError: the model shall write answers, or one of them cannot be loaded or is no reward model."""
    require_no_answers(case.request, "a reward model scores answers", "its scores")
    endings = {subject.name: _ending(case, subject) for subject in case.subjects}
    rows = case.rows
    assert rows is not None
    judged = Judged(SCORES, {}, {subject.name: {} for subject in case.subjects})
    for subject in case.subjects:
        rewards_NA = _rewards(case, subject, endings[subject.name])
        if not rows.are_pairs:
            judged.statistics[subject.name] = {"reward": rewards_NA}
            continue
        each = {"chosen_reward": rewards_NA[:, :1], "rejected_reward": rewards_NA[:, 1:]}
        judged.statistics[subject.name] = {**pairs.ahead("reward", rewards_NA), **each}
    judged.prediction = shown(case, rows, {}, judged)
    return judged


def _ending(case: Case, subject: Subject) -> tuple[int, ...]:
    """Tokens that a model reads after an answer."""
    if not subject.artifact.is_reward:
        raise ModelError(
            f"`{subject.name}` is no reward model: it was not trained with train.objective reward",
            where="--baseline",
            repair="compare with another reward model",
        )
    return ending(subject.artifact, case.config.model if subject is case.tuned else subject.artifact.tokenizer)


def _rewards(case: Case, subject: Subject, end: tuple[int, ...]) -> FloatArray:
    """(N, A): of each row's answer, or of the chosen and the rejected one."""
    rows = case.rows_for(subject.artifact)
    assert rows is not None
    numbers = [number + after for number in rows.numbers for after in range(1 + rows.are_pairs)]
    read = {number: _ended(*rows.split.row(number), end) for number in numbers}
    classified = classified_rows(case, subject, rows.fingerprint, read, None, REWARD)
    rewards = np.array([row.label for row in classified.predictions], dtype=np.float64)
    return rewards.reshape(len(rows.numbers), -1)


def _ended(ids: np.ndarray, learned: np.ndarray, end: tuple[int, ...]) -> Row:
    """A row up to the end of its last answer, as pairs are trained on, and what follows, as tokens of one text."""
    ids = np.asarray([*ids[: int(np.flatnonzero(learned)[-1]) + 1], *end])
    return ids, np.zeros_like(ids, dtype=np.uint8)
