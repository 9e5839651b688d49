"""What seeds the generators of a step, and what an evaluation sums; steps themselves are in tests/training."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from finray.training.step import evaluate, reseed

CPU = torch.device("cpu")


def batch(value: float) -> Any:
    def to(device: torch.device) -> float:
        assert device == CPU
        return value

    return SimpleNamespace(to=to)


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
    # One of two ranks; the other gives the same.
    strategy: Any = SimpleNamespace(device=CPU, all_reduce=lambda values: values * 2)
    assert evaluate(task, strategy, loader, told.append) == ({"sum": 13.0}, [[13]])
    assert told == [0.0, 0.25, 0.5, 0.75]
