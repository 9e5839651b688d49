"""Answers during training: who answers which prompt, and in which order they are scored.

`tests/training/test_answers_in_training.py` compares the answers with plain PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.data.sampling.groups import Groups
from finray.errors import DataError, TrainingError
from finray.evaluation import during
from finray.evaluation.during import TrainingAnswers
from tests.support.ranks import Group
from tests.support.runs import config_of

# Prompts of two tokens, and answers of one.
ROWS = [([10 + row, 20 + row, 30 + row], [0, 0, 1]) for row in range(5)]


class Split:
    def __init__(self, *more: Any) -> None:
        self.rows = [*more, *ROWS]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def groups(self) -> Groups:
        return Groups.single(len(self))

    def row(self, number: int) -> tuple[Any, Any]:
        ids, mask = self.rows[number]
        return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)


class Words:
    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))


def made() -> TrainingAnswers:
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "evaluation": {"metrics": ["exact_match"]}}
    answers = TrainingAnswers(config_of(plain), "fp32")
    answers.__dict__["_tokenizer"] = Words()
    return answers


class Engine:
    """Says the token 10 above the last of a prompt, last prompts first, but of the last two rows something else."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **options: Any) -> Engine:
        return cls()

    def generate(self, prompts: list[list[int]], sampling: Any) -> Iterator[Any]:
        for row, prompt in reversed(list(enumerate(prompts))):
            yield SimpleNamespace(row=row, text=str(prompt[-1] + 10) if prompt[0] < 13 else "else")

    def close(self) -> None:
        """Nothing is held."""


MODEL = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(_attn_implementation="sdpa"))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_prompt_is_answered_once_and_scored_with_its_own_reference(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(during, "TransformersEngine", Engine)
    told: dict[int, list[float]] = {rank: [] for rank in range(world)}

    def answer(strategy: Any) -> dict[str, float]:
        task: Any = SimpleNamespace(model=MODEL)
        return made()(task, Split(), strategy, told[strategy.rank].append)  # type: ignore[arg-type]

    assert Group(world).run(answer) == [{"exact_match": 3 / 5}] * world
    for rank, shares in told.items():
        own = len(range(rank, 5, world))
        assert shares == pytest.approx([(done + 1) / own for done in range(own)])


def test_a_row_without_a_prompt_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(during, "TransformersEngine", Engine)
    task: Any = SimpleNamespace(model=MODEL)
    mixed, text = Split(([1, 2], [1, 1])), Split(([1, 2], [1, 1]))
    text.rows = text.rows[:1]
    assert Group(2).run(lambda strategy: made()(task, mixed, strategy)) == [{"exact_match": 3 / 5}] * 2  # type: ignore[arg-type]
    found = Group(2).run(lambda strategy: made()(task, text, strategy))  # type: ignore[arg-type]
    assert ["no held-out row has a prompt" in str(one) for one in found] == [True] * 2


def test_a_prompt_without_an_answer_and_a_score_that_fails_are_errors_of_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Iterator[Any]:
        raise DataError("the prompt is empty")

    task: Any = SimpleNamespace(model=MODEL)
    monkeypatch.setattr(during, "TransformersEngine", Engine)
    monkeypatch.setattr(Engine, "generate", refuse)
    found = Group(2).run(lambda strategy: made()(task, Split(), strategy))  # type: ignore[arg-type]
    assert [str(one) for one in found] == [str(DataError("the prompt is empty"))] * 2
    monkeypatch.undo()
    monkeypatch.setattr(during, "TransformersEngine", Engine)
    monkeypatch.setattr(during, "score_named", lambda name, scoring: SimpleNamespace(value=lambda rows: 1 / 0))
    found = Group(2).run(lambda strategy: made()(task, Split(), strategy))  # type: ignore[arg-type]
    assert all(isinstance(one, TrainingError) and "exact_match" in str(one) for one in found)
