"""Schedules against their formulas, and against Transformers' where the two mean the same."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finray.config.load import build_config
from finray.config.schema import TrainConfig
from finray.errors import ConfigError
from finray.training.schedule import learning_rate, passes_multiple, warmup_steps


def rates(total: int, **fields: object) -> list[float]:
    train = TrainConfig(**fields)  # type: ignore[arg-type]
    return [learning_rate(train, 1.0, update=update, total=total) for update in range(total)]


# finray's fields, and the name and arguments of the same schedule in Transformers; the peak is 1.
ALIKE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"schedule": "cosine"}, "cosine", {}),
    ({"schedule": "cosine", "min_learning_rate": 0.2}, "cosine_with_min_lr", {"min_lr": 0.2}),
    ({"schedule": "linear"}, "linear", {}),
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    ({"schedule": "polynomial"}, "polynomial", {"lr_end": 0.0}),
    (
        {"schedule": "polynomial", "schedule_options": {"power": 2.5}, "min_learning_rate": 0.1},
        "polynomial",
        {"power": 2.5, "lr_end": 0.1},
    ),
    ({"schedule": "cosine_with_restarts"}, "cosine_with_restarts", {}),
    (
        {"schedule": "cosine_with_restarts", "schedule_options": {"num_cycles": 3}},
        "cosine_with_restarts",
        {"num_cycles": 3},
    ),
    ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
    ({"schedule": "inverse_sqrt", "schedule_options": {"timescale": 7}}, "inverse_sqrt", {"timescale": 7}),
    ({"schedule": "wsd"}, "warmup_stable_decay", {"num_decay_steps": 4}),
    *(
        (
            {
                "schedule": "wsd",
                "schedule_options": {"num_decay_steps": 13, "decay_type": shape},
                "min_learning_rate": 0.1,
            },
            "warmup_stable_decay",
            {"num_decay_steps": 13, "decay_type": shape, "min_lr_ratio": 0.1},
        )
        for shape in ("cosine", "linear", "1-sqrt")
    ),
]


@pytest.mark.parametrize(("ours", "name", "arguments"), ALIKE)
def test_after_the_warm_up_the_schedule_is_that_of_transformers(
    ours: dict[str, Any], name: str, arguments: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, 5, 40, scheduler_specific_kwargs=arguments)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(40, **ours, warmup_steps=5)[5:] == pytest.approx(expected[5:])


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"schedule": "cosine"}, 0.2),
        ({"schedule": "linear"}, 0.2),
        ({"schedule": "constant"}, 1.0),
        ({"schedule": "polynomial", "schedule_options": {"power": 3.0}}, 0.2),
        ({"schedule": "cosine_with_restarts", "schedule_options": {"num_cycles": 3}}, 0.2),
        ({"schedule": "inverse_sqrt"}, (40 / 5) ** -0.5),
        ({"schedule": "wsd"}, 0.2),
    ],
)
def test_the_rate_after_the_last_update_is_the_minimum(fields: dict[str, Any], last: float) -> None:
    """An extended run says from which rate it comes."""
    lowest = 0.0 if fields["schedule"] == "constant" else 0.2
    train = TrainConfig(learning_rate=1.0, min_learning_rate=lowest, warmup_steps=5, **fields)
    assert learning_rate(train, 1.0, update=40, total=40) == pytest.approx(last)
    # A run that was all warm-up.
    assert learning_rate(train, 1.0, update=5, total=5) == pytest.approx(0.2 if fields["schedule"] == "wsd" else 1.0)


def test_a_decay_that_is_longer_than_the_run_begins_after_the_warm_up() -> None:
    fields: dict[str, Any] = {"schedule": "wsd", "schedule_options": {"num_decay_steps": 99, "decay_type": "linear"}}
    assert rates(6, **fields, warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(("total", "decay"), [(1000, 100), (101, 11), (100, 10), (10, 1), (5, 1)])
def test_a_decay_takes_a_tenth_of_the_run_rounded_up(total: int, decay: int) -> None:
    values = rates(total, schedule="wsd", schedule_options={"decay_type": "linear"}, warmup_steps=0)
    assert values == pytest.approx([1.0] * (total - decay) + [1 - done / decay for done in range(decay)])


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        ("cosine", {"num_cycles": 2}, "belongs to the schedule cosine_with_restarts, but train.schedule is cosine"),
        ("wsd", {"power": 2.0}, "train.schedule_options.power belongs to the schedule polynomial"),
        ("polynomial", {"powr": 2.0}, "train.schedule_options.powr: unknown key (did you mean `power`?)"),
        ("polynomial", {"power": 0}, "train.schedule_options.power"),
    ],
)
def test_an_option_of_another_schedule_is_refused(schedule: str, options: dict[str, Any], said: str) -> None:
    train = {"schedule": schedule, "schedule_options": options}
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"name": "m"}, "data": {"source": "d"}, "train": train}, source="test")
    assert said in str(caught.value)


def test_a_last_rate_of_a_schedule_that_does_not_decay_is_not_used_and_that_is_said() -> None:
    train = TrainConfig(schedule="constant", learning_rate=1e-3, min_learning_rate=1e-4)
    assert train.replaced == ("train.schedule=constant takes the place of train.min_learning_rate=0.0001",)
    assert TrainConfig(schedule="linear", learning_rate=1e-3, min_learning_rate=1e-4).replaced == ()


def test_warm_up_is_linear_and_wastes_no_step() -> None:
    assert rates(10, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, *[1.0] * 7]


def test_warm_up_by_ratio_or_steps() -> None:
    assert warmup_steps(TrainConfig(warmup_ratio=0.1), 95) == 10
    assert warmup_steps(TrainConfig(warmup_ratio=0.1, warmup_steps=0), 95) == 0


def test_fields_whose_place_another_takes_are_named() -> None:
    assert TrainConfig(epochs=3, max_steps=4).replaced == ("train.max_steps=4 takes the place of train.epochs=3",)
    replaced = TrainConfig(warmup_ratio=0.1, warmup_steps=0).replaced
    assert replaced == ("train.warmup_steps=0 takes the place of train.warmup_ratio=0.1",)
    assert TrainConfig(epochs=3, warmup_ratio=0.1).replaced == TrainConfig(max_steps=3, warmup_steps=4).replaced == ()


@given(st.integers(1, 3000), st.integers(1, 12), st.integers(0, 9000), st.integers(1, 64))
def test_a_part_of_an_epoch_ends_where_it_ends_in_whole_numbers(rows: int, parts: int, before: int, items: int) -> None:
    part, after = Fraction(rows, parts), before + items
    assert passes_multiple(before, after, (1 / parts) * rows) == (after // part > before // part)


def test_a_fifth_of_an_epoch_ends_with_the_epoch() -> None:
    """`7 // (0.2 * 7)` is 4: in floats, the last part would end a step late."""
    assert 7 // (0.2 * 7) == 4
    assert passes_multiple(6, 7, 0.2 * 7)
