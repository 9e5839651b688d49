"""Schedules against their formulas, and against Transformers' where the two mean the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from finray.config.schema import TrainConfig
from finray.training.schedule import learning_rate, warmup_steps


def rates(total: int, **fields: object) -> list[float]:
    train = TrainConfig(learning_rate=1.0, **fields)  # type: ignore[arg-type]
    return [learning_rate(train, update=update, total=total) for update in range(total)]


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_the_decay_is_that_of_transformers(schedule: str, theirs: object) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = theirs(optimizer, 5, 40)  # type: ignore[operator]
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(40, schedule=schedule, warmup_steps=5)[5:] == pytest.approx(expected[5:])


def test_warm_up_is_linear_and_wastes_no_step() -> None:
    assert rates(10, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, *[1.0] * 7]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_minimum_is_approached_and_never_passed(schedule: str) -> None:
    values = rates(50, schedule=schedule, warmup_steps=0, min_learning_rate=0.1)
    assert values[0] == 1.0
    assert all(earlier > later for earlier, later in itertools.pairwise(values))
    assert 0.1 < values[-1] < 0.15


def test_warm_up_by_ratio_or_steps() -> None:
    assert warmup_steps(TrainConfig(warmup_ratio=0.1), 95) == 10
    assert warmup_steps(TrainConfig(warmup_ratio=0.1, warmup_steps=0), 95) == 0
