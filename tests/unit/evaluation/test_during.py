"""Answers during training: who answers which prompt, in which order they are scored, and with which attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.errors import DataError, TrainingError
from finray.evaluation import during
from finray.evaluation.during import Answers
from finray.models import attention
from tests.support.ranks import Group
from tests.support.runs import config_of

# Prompts of two tokens, and answers of one.
ROWS = [([10 + row, 20 + row, 30 + row], [0, 0, 1]) for row in range(5)]


class Split:
    def __init__(self, *more: Any) -> None:
        self.rows = [*more, *ROWS]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> tuple[Any, Any]:
        ids, mask = self.rows[number]
        return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)


class Words:
    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))


def made(precision: str = "fp32", **evaluation: Any) -> Answers:
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "evaluation": {"metrics": ["exact_match"], **evaluation}}
    answers = Answers(config_of(plain), precision)
    answers.__dict__["_tokenizer"] = Words()
    return answers


class Engine:
    """Says the token 10 above the last of a prompt, last prompts first, but of the last two rows something else."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def of(self, model: Any, tokenizer: Any, **options: Any) -> Engine:
        self.seen.append((model.attention, torch.is_autocast_enabled("cpu"), options))
        return self

    def generate(self, prompts: list[list[int]], sampling: Any) -> Iterator[Any]:
        self.seen.append((sampling.max_new_tokens, sampling.temperature))
        for row, prompt in reversed(list(enumerate(prompts))):
            yield SimpleNamespace(row=row, text=str(prompt[-1] + 10) if prompt[0] < 13 else "else")

    def close(self) -> None:
        """The model has its attention again."""
        self.seen.append("closed")


class Model:
    """A model with finray's attention, which can have only some of Transformers'."""

    device = torch.device("cpu")

    def __init__(self, usual: str = attention.NAME, *others: str) -> None:
        self.attention, self.others = usual, (usual, *others)
        self.config = SimpleNamespace(_attn_implementation=usual)

    def set_attn_implementation(self, name: str) -> None:
        if name not in self.others:
            raise ValueError(name)
        self.attention = name


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_prompt_is_answered_once_and_scored_with_its_own_reference(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(during, "TransformersEngine", Engine([]))
    told: dict[int, list[float]] = {rank: [] for rank in range(world)}

    def answer(strategy: Any) -> dict[str, float]:
        task: Any = SimpleNamespace(model=Model("sdpa"))
        return made()(task, Split(), strategy, told[strategy.rank].append)  # type: ignore[arg-type]

    assert Group(world).run(answer) == [{"exact_match": 3 / 5}] * world
    for rank, shares in told.items():
        own = len(range(rank, 5, world))
        assert shares == pytest.approx([(done + 1) / own for done in range(own)])


def test_a_row_without_a_prompt_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(during, "TransformersEngine", Engine([]))
    task: Any = SimpleNamespace(model=Model("sdpa"))
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

    task: Any = SimpleNamespace(model=Model("sdpa"))
    monkeypatch.setattr(during, "TransformersEngine", Engine([]))
    monkeypatch.setattr(Engine, "generate", refuse)
    found = Group(2).run(lambda strategy: made()(task, Split(), strategy))  # type: ignore[arg-type]
    assert [str(one) for one in found] == [str(DataError("the prompt is empty"))] * 2
    monkeypatch.undo()
    monkeypatch.setattr(during, "TransformersEngine", Engine([]))
    monkeypatch.setattr(during, "score_named", lambda name, scoring: SimpleNamespace(value=lambda rows: 1 / 0))
    found = Group(2).run(lambda strategy: made()(task, Split(), strategy))  # type: ignore[arg-type]
    assert all(isinstance(one, TrainingError) and "exact_match" in str(one) for one in found)


@pytest.mark.parametrize(("precision", "autocast"), [("fp32", False), ("bf16", True)])
@pytest.mark.parametrize(
    ("model", "inside"),
    [
        (Model(attention.NAME, "sdpa", "eager"), "sdpa"),
        (Model(attention.NAME, "eager"), "eager"),
        (Model("flash_attention_2", "sdpa", "eager"), "flash_attention_2"),
    ],
)
def test_prompts_are_answered_with_transformers_attention_in_the_precision_of_training(
    monkeypatch: pytest.MonkeyPatch, precision: str, autocast: bool, model: Model, inside: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(during, "TransformersEngine", Engine(seen))
    usual = model.attention
    answers = made(precision, max_new_tokens=9, batch_size=3)
    assert answers._answer(model, [[10, 20], [14, 24], [12, 22]], lambda share: None) == ["30", "else", "32"]
    assert seen == [(inside, autocast, {"batch_size": 3}), (9, 0.0), "closed"]
    assert model.attention == usual
    monkeypatch.setattr(Engine, "generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answers._answer(model, [[10, 20]], lambda share: None)
    assert model.attention == usual
