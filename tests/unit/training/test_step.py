"""One step and one evaluation, with a strategy that writes down what it is asked; the gradients by hand."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.training.loader import StepData
from finray.training.nonfinite import NonFiniteGuard
from finray.training.state import TrainState
from finray.training.step import Signals, evaluate, reseed, train_step

CPU = torch.device("cpu")


class Alone:
    """One of two ranks; the other gives the same."""

    device = CPU

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.asked.append(("backward", loss.item(), last))
        loss.backward()

    def all_reduce_gradients(self, parameters: list[torch.Tensor], extra: torch.Tensor) -> torch.Tensor:
        self.asked.append("all_reduce")
        for one in parameters:
            assert one.grad is not None
            one.grad *= 2
        return extra * 2

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    def unscale_gradients(self, parameters: list[torch.Tensor], scale: torch.Tensor) -> None:
        self.asked.append(("unscale", scale.item()))
        for one in parameters:
            assert one.grad is not None
            one.grad /= scale

    def clip_grad_norm(self, parameters: list[torch.Tensor], most: float | None) -> torch.Tensor:
        self.asked.append(("clip", most))
        (one,) = parameters
        assert one.grad is not None
        return one.grad.abs()


def batch(value: float) -> Any:
    def to(device: torch.device) -> float:
        assert device == CPU
        return value

    return SimpleNamespace(to=to)


@pytest.mark.parametrize(("real", "dummies"), [(1, 0), (3, 0), (2, 2), (0, 2)])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_is_one_mean_over_all_micro_batches_and_the_last_backward_pass_is_marked(
    real: int, dummies: int, scaled: bool
) -> None:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    draws: list[int] = []

    def loss_sum(value: float) -> torch.Tensor:
        draws.append(torch.initial_seed())
        return weight * value

    strategy, steps = Alone(), list[Any]()
    optimizer: Any = SimpleNamespace(
        parameters={"w": weight},
        step=lambda rate, *, found_inf: steps.append((rate, float(found_inf), weight.grad.item())),  # type: ignore[union-attr]
    )
    state = TrainState(step=6, random_key=11, loss_scale=8.0 if scaled else None)
    values = [2.0, 5.0, 7.0][:real]
    data = StepData(
        [(4 + 2 * at, batch(value)) for at, value in enumerate(values)],
        *(10.0, 9, 100, (1, 2), 3),
        dummy_batches=tuple(batch(100.0) for _ in range(dummies)),
    )
    pulse: Any = SimpleNamespace(waits=lambda: strategy.asked.append("waits"))
    task: Any = SimpleNamespace(loss_sum=loss_sum)
    guard = NonFiniteGuard(state, CPU, scaled=scaled)
    options: Any = {"learning_rate": 0.5, "max_grad_norm": 0.25, "signals": Signals(1, 0, 3), "pulse": pulse}
    found = train_step(task, strategy, optimizer, data, state, guard, **options)  # type: ignore[arg-type]
    # Divided by the weight of the whole step, not by that of this rank; what is ignored counts as nothing.
    factor = 8.0 if scaled else 1.0
    losses = [factor * 3.0 * value / 10 for value in values] + [0.0] * dummies
    lasts = [False] * (real + dummies - 1) + [True]
    backwards = [("backward", pytest.approx(loss), last) for loss, last in zip(losses, lasts, strict=True)]
    unscaled = [("unscale", 8.0)] if scaled else []
    assert strategy.asked == [*backwards, "waits", "all_reduce", *unscaled, ("clip", 0.25)]
    gradient = 2 * sum(values) / 10
    assert steps == [(0.5, 0.0, pytest.approx(gradient))]
    assert float(found.loss) == pytest.approx(2 * 3.0 * sum(values) / 10)
    assert float(found.grad_norm) == pytest.approx(gradient)
    assert found.signals.tolist() == [2.0, 0.0, 6.0]
    assert draws[:real] == [seed(11, 6, 4 + 2 * at) for at in range(real)]


def seed(*parts: int) -> int:
    """As docs/formats.md says: the first eight bytes of the SHA-256 of the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def test_without_a_signal_or_a_pulse_nothing_is_said() -> None:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    optimizer: Any = SimpleNamespace(parameters={"w": weight}, step=lambda rate, *, found_inf: None)
    task: Any = SimpleNamespace(loss_sum=lambda value: weight * value)
    strategy, state = Alone(), TrainState()
    data = StepData([(0, batch(2.0))], 1.0, 1, 1, (1,), 1)
    guard = NonFiniteGuard(state, CPU, scaled=False)
    found = train_step(task, strategy, optimizer, data, state, guard, learning_rate=1.0, max_grad_norm=None)  # type: ignore[arg-type]
    assert found.signals.tolist() == [0.0] * 3
    assert strategy.asked == [("backward", 6.0, True), "all_reduce", ("clip", None)]


def test_every_generator_is_seeded_by_the_run_the_step_and_the_micro_batch() -> None:
    reseed(3, 14, 15)
    found = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    key = seed(3, 14, 15)
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(key)).tolist()
    assert found == (wanted, np.random.RandomState(key % 2**32).rand(3).tolist(), random.Random(key).random())


def test_an_evaluation_sums_over_ranks_what_counts() -> None:
    told: list[float] = []

    def score(value: float, sums: torch.Tensor) -> None:
        sums += value

    task: Any = SimpleNamespace(
        metric_count=lambda rows: rows,
        score=score,
        metrics=lambda sums: {"sum": sums[0]},
        confusion=lambda sums: [[int(sums[1])]],
    )
    batches = [(batch(2.0), True), (batch(100.0), False), (batch(3.5), True), (batch(1.0), True)]
    loader: Any = SimpleNamespace(rows=2, passes=4, batches=lambda: iter(batches))
    assert evaluate(task, Alone(), loader, told.append) == ({"sum": 13.0}, [[13]])  # type: ignore[arg-type]
    assert told == [0.0, 0.25, 0.5, 0.75]
