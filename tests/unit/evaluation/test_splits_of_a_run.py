"""Which split of a run is evaluated, and what is said where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from finray.config.schema import DataConfig
from finray.data.dataset.prepared import Splits
from finray.errors import DataError
from finray.evaluation import rows
from finray.evaluation.rows import Lazy, of_run, prompt_and_answer, stream_of


@pytest.mark.parametrize(
    ("there", "asked", "wanted"),
    [
        ("train eval test", None, "test"),
        ("train eval", None, "eval"),
        ("train test", None, "test"),
        ("train eval test", "eval", "eval"),
        ("train eval test", "train", "train"),
    ],
)
def test_the_split_that_is_asked_for_else_the_test_or_the_evaluation_split(
    monkeypatch: pytest.MonkeyPatch, there: str, asked: str | None, wanted: str
) -> None:
    splits = Splits(*(name if name in there else None for name in ("train", "eval", "test")))  # type: ignore[arg-type]
    own: Any = "run"
    monkeypatch.setattr(rows, "splits_of", lambda run, config: (splits, f"dataset of {run} {config}"))
    assert of_run(own, "config", asked) == (wanted, wanted, "dataset of run config", "train")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("there", "asked", "said", "others"),
    [
        ("train", None, "the run has no held-out rows to evaluate on", "train"),
        ("train eval", "test", "the run has no split `test`", "train, eval"),
        ("train test", "eval", "the run has no split `eval`", "train, test"),
    ],
)
def test_a_split_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, there: str, asked: str | None, said: str, others: str
) -> None:
    splits = Splits(*(name if name in there else None for name in ("train", "eval", "test")))  # type: ignore[arg-type]
    monkeypatch.setattr(rows, "splits_of", lambda run, config: (splits, "dataset"))
    with pytest.raises(DataError) as caught:
        of_run("run", "config", asked)  # type: ignore[arg-type]
    assert caught.value.message == said
    assert str(caught.value.repair).endswith(f"--split: {others}")


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
