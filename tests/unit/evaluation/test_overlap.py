"""Rows that are in the training data: found and named; what belongs to a template, or is common, is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from finray.evaluation import overlap as module
from finray.evaluation.overlap import RUN, overlap


class Split:
    """Rows in memory."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = [np.array(row, dtype=np.int32) for row in rows]
        self.lengths = np.array([len(row) for row in rows])
        self.digests = np.array([hash(tuple(row)) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> tuple[Any, Any]:
        return self.rows[number], np.ones(len(self.rows[number]), dtype=np.uint8)

    def where(self, number: int) -> str:
        return f"rows.jsonl:{number + 1}"


TEMPLATE = list(range(1, 30))


def row(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(100, 50_000, length).tolist()


def rows(seeds: Sequence[int]) -> list[list[int]]:
    return [[*TEMPLATE, *row(seed)] for seed in seeds]


def found(test: list[list[int]], train: list[list[int]], numbers: Sequence[int] | None = None) -> Any:
    return overlap(Split(test), range(len(test)) if numbers is None else numbers, Split(train))  # type: ignore[arg-type]


def naive(test: list[list[int]], train: list[list[int]]) -> set[int]:
    """Indices of rows with a run of 13 tokens that is in a training row, the template aside."""

    def runs(one: list[int]) -> set[tuple[int, ...]]:
        every = {tuple(one[at : at + RUN]) for at in range(len(one) - RUN + 1)}
        return {one for one in every if not set(one) <= set(TEMPLATE)}

    known = set().union(*map(runs, train))
    return {number for number, one in enumerate(test) if runs(one) & known}


def test_equal_rows_and_rows_that_share_a_run_are_named() -> None:
    test, train = rows(range(10)), rows(range(100, 140))
    train[7] = test[2]
    train[30] = [*TEMPLATE, *row(500, 9), *test[5][35:55], *row(501, 4)]
    seen = found(test, train)
    assert (seen.equal, seen.shared) == ((2,), (5,))
    assert seen.rows == {2, 5}
    first, second = sorted(seen.named)
    assert first[:2] == ("rows.jsonl:3", "rows.jsonl:8")
    assert first[2] == 1.0
    assert second[:2] == ("rows.jsonl:6", "rows.jsonl:31")
    assert 0 < second[2] < 0.5


def test_twelve_tokens_in_common_are_not_enough() -> None:
    test, train = rows(range(4)), rows(range(100, 104))
    for length, expected in ((RUN - 1, ()), (RUN, (1,))):
        train[3] = [*row(9, 5), *test[1][30 : 30 + length], *row(10, 5)]
        assert found(test, train).shared == expected


@pytest.mark.parametrize("block", [1, 50, 2**20])
def test_all_shared_runs_are_found_whatever_is_hashed_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOKENS", block)
    draw = np.random.default_rng(0)
    test, train = rows(range(30)), rows(range(100, 160))
    for number in (3, 11, 29):
        at = int(draw.integers(30, 50))
        other = train[int(draw.integers(0, 60))]
        other[34:34] = test[number][at : at + 14]
    assert found(test, train).rows == naive(test, train) == {3, 11, 29}


def test_what_is_in_many_training_rows_does_not_count() -> None:
    phrase = row(999, 20)
    test = rows(range(6))
    test[0] = [*TEMPLATE, *row(50, 8), *phrase, *row(51, 8)]
    few = [[*TEMPLATE, *row(seed, 6), *phrase, *row(seed + 1, 6)] for seed in range(200, 208)]
    assert found(test, few).shared == (0,)
    many = [[*TEMPLATE, *row(seed, 6), *phrase, *row(seed + 1, 6)] for seed in range(200, 240)]
    assert found(test, many).shared == ()


def test_only_the_rows_that_are_evaluated_are_looked_at() -> None:
    test = rows(range(8))
    train = [test[1], test[6], *rows(range(100, 110))]
    assert found(test, train, (0, 1, 4)).equal == (1,)
    assert found(test, train, (6,)).equal == (0,)
    assert found(test, train, (6,)).named[0][:2] == ("rows.jsonl:7", "rows.jsonl:2")


@pytest.mark.parametrize("short", [[], [5], list(range(RUN - 1))])
def test_rows_shorter_than_a_run_are_no_trouble(short: list[int]) -> None:
    seen = found([short, row(1)], [short, row(2)] if short else [row(2)])
    assert seen.equal == ((0,) if short else ())
    assert seen.shared == ()
