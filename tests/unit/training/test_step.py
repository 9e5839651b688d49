"""How the passes of a step are marked and seeded, and what an evaluation sums; whole runs are in tests/training."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.objectives.sft import SFT
from finray.training.loader import StepData
from finray.training.nonfinite import NonFiniteGuard
from finray.training.state import TrainState
from finray.training.step import evaluate, reseed, train_step

CPU = torch.device("cpu")


def batch(value: float) -> Any:
    def to(device: torch.device) -> float:
        assert device == CPU
        return value

    return SimpleNamespace(to=to)


@pytest.mark.parametrize(("real", "dummies"), [(1, 0), (3, 0), (2, 2), (0, 2)])
def test_the_last_backward_pass_of_a_step_is_marked_and_what_is_ignored_adds_nothing(real: int, dummies: int) -> None:
    """Then a bucket of gradients is on its way while the rest is worked out."""
    weight, asked = torch.nn.Parameter(torch.tensor(3.0)), list[Any]()
    optimizer: Any = SimpleNamespace(parameters={"w": weight}, step=lambda rate, *, found_inf: None)
    task: Any = SimpleNamespace(outputs=lambda value: weight * value, objective=SFT(), in_step=None)
    strategy: Any = SimpleNamespace(
        device=CPU,
        backward=lambda loss, *, last: asked.append((float(loss.detach()), last)),
        all_reduce_gradients=lambda parameters, extra: extra,
        clip_grad_norm=lambda parameters, most: weight.detach(),
    )
    batches = [(number, batch(10.0)) for number in range(real)]
    data = StepData(batches, 10.0, 9, 100, (1, 2), 3, dummy_batches=tuple(batch(100.0) for _ in range(dummies)))
    state = TrainState()
    guard = NonFiniteGuard(state, CPU, scaled=False)
    train_step(task, strategy, optimizer, data, state, guard, learning_rate=0.5, max_grad_norm=0.25)
    assert asked == list(zip([3.0] * real + [0.0] * dummies, [False] * (real + dummies - 1) + [True], strict=True))


def seed(*parts: int) -> int:
    """As docs/formats.md says: the first eight bytes of the SHA-256 of the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def test_every_generator_is_seeded_by_the_run_the_step_and_the_micro_batch() -> None:
    reseed(3, 14, 15)
    found = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    key = seed(3, 14, 15)
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(key)).tolist()
    assert found == (wanted, np.random.RandomState(key % 2**32).rand(3).tolist(), random.Random(key).random())


def test_an_evaluation_sums_over_ranks_what_counts() -> None:
    told: list[float] = []

    def score(outputs: float, batch: float, sums: torch.Tensor) -> None:
        assert outputs == 2 * batch
        sums += batch

    objective: Any = SimpleNamespace(
        metric_count=lambda rows: rows,
        score=score,
        metrics=lambda sums: {"sum": sums[0]},
        confusion=lambda sums: [[int(sums[1])]],
        spec=SimpleNamespace(before=()),
    )
    task: Any = SimpleNamespace(objective=objective, outputs=lambda value: 2 * value, in_step=None)
    batches = [(batch(2.0), True), (batch(100.0), False), (batch(3.5), True), (batch(1.0), True)]
    loader: Any = SimpleNamespace(rows=2, passes=4, batches=lambda: iter(batches), batches_before=lambda: iter(()))
    # One of two ranks; the other gives the same.
    strategy: Any = SimpleNamespace(device=CPU, all_reduce=lambda values: values * 2)
    assert evaluate(task, strategy, loader, told.append) == ({"sum": 13.0}, [[13]])
    assert told == [0.0, 0.25, 0.5, 0.75]
