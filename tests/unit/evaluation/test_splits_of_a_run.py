"""Which split of a run is evaluated, and what is said where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from finray.config.schema import DataConfig
from finray.evaluation.rows import Lazy, prompt_and_answer, stream_of


@pytest.mark.parametrize(
    ("ratios", "streams"),
    [
        ({}, ["train", "eval", "test"]),
        ({"eval_ratio": 0.1}, ["train", "train", "test"]),
        ({"test_ratio": 0.1}, ["train", "eval", "train"]),
        ({"eval_ratio": 0.1, "test_ratio": 0.1}, ["train", "train", "train"]),
    ],
)
def test_rows_that_a_ratio_holds_out_are_prepared_with_the_training_rows(
    ratios: dict[str, float], streams: list[str]
) -> None:
    data = DataConfig(source="x", **ratios)  # type: ignore[arg-type]
    assert [stream_of(name, data) for name in ("train", "eval", "test")] == streams


@pytest.mark.parametrize(
    ("mask", "prompt", "answer"),
    [
        ([0, 0, 1, 1], [1, 2], [3, 4]),
        ([0, 1, 1, 0], [1], [2, 3]),
        ([1, 0, 1, 0], [1, 2], [3]),
        ([1, 1, 0, 1], [1, 2, 3], [4]),
        ([1, 1, 1, 1], [], [1, 2, 3, 4]),
    ],
)
def test_the_last_answer_of_a_row_and_what_is_before_it(mask: list[int], prompt: list[int], answer: list[int]) -> None:
    ids = np.array([1, 2, 3, 4], dtype=np.int32)
    assert prompt_and_answer(ids, np.array(mask, dtype=np.uint8)) == (prompt, answer)


def test_items_of_a_lazy_sequence_are_those_of_a_list_and_made_when_they_are_asked_for() -> None:
    made: list[int] = []
    lazy, plain = Lazy(5, lambda index: made.append(index) or 10 * index), [0, 10, 20, 30, 40]
    assert (len(lazy), made) == (5, [])
    assert [lazy[index] for index in range(-5, 5)] == [plain[index] for index in range(-5, 5)]
    assert made == [*range(5), *range(5)]
    for part in (slice(1, 3), slice(None, -1), slice(None, None, 2), slice(-2, 99), slice(9, 12)):
        assert lazy[part] == plain[part]
    for index in (5, -6):
        with pytest.raises(IndexError):
            _ = lazy[index]
    assert list(Lazy(0, lambda index: index)) == []
    assert list(lazy) == plain
