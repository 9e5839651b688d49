"""Rows of one tokenizer found again with another, for a baseline with a tokenizer of its own; their fingerprints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.source_rows import SourceRows
from finray.errors import DataError
from finray.evaluation.rows import EvaluationRows
from tests.support.preparing import Preparing, Write, ids, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture
def mix(put: Write) -> list[dict[str, Any]]:
    """Two rows three times each, and two of six, each of which is a long text in several chunks."""
    few = put("few.jsonl", lines([{"text": "few one"}, {"text": "few two"}]))
    many = put("many.jsonl", lines([{"text": f"{TEXT} {number} {TEXT}"} for number in range(6)]))
    return [{"source": str(few), "count": 6}, {"source": str(many), "count": 5}]


def rows_of(dataset: PreparedDataset, split: PreparedSplit) -> EvaluationRows:
    return EvaluationRows("train", split, tuple(range(len(split))), dataset, False, None, "train")


def test_rows_of_a_mix_are_the_same_rows_with_another_tokenizer(preparing: Preparing, mix: Any) -> None:
    """Rows that a mix repeats, and chunks of a text that it takes without the others."""
    data = {"mix": mix, "eval_ratio": 0.0, "max_length": 16}
    dataset, config = preparing.dataset(**data), preparing.config(**data)
    rows = rows_of(dataset, dataset.splits(config.data, seed=config.run.seed).train)
    every = dataset.all_rows("train")
    assert every is not None
    assert len(every) > 12
    found = rows.like(rows.keys()), replace(rows_of(dataset, every), numbers=()).like(rows.keys())
    for one in found:
        assert [one.split.row(number)[0].tolist() for number in one.numbers] == [
            rows.split.row(number)[0].tolist() for number in rows.numbers
        ]
    # A chunk is not a first one because the first one of its text was not taken.
    last = int(np.flatnonzero(every.within > 0)[-1])
    (key,) = rows_of(dataset, every.take(np.array([last]))).keys()
    assert rows_of(dataset, every).like([key]).numbers == (last,)


def test_rows_that_a_tokenizer_leaves_out_are_counted(preparing: Preparing, mix: Any) -> None:
    dataset = preparing.dataset(mix=mix, eval_ratio=0.0, max_length=16)
    every = dataset.all_rows("train")
    assert every is not None
    with pytest.raises(DataError, match="1 of the 2 rows are left out with the baseline's tokenizer"):
        rows_of(dataset, every).like([(0, 0), (0, 1)])


def test_the_source_is_read_as_far_as_rows_are_wanted(
    preparing: Preparing, mix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"mix": mix, "eval_ratio": 0.0, "max_length": 16}
    dataset, config = preparing.dataset(**data), preparing.config(**data)
    every = dataset.all_rows("train")
    assert every is not None
    rows, read = rows_of(dataset, every), list[Any]()
    whole = dict(rows.columns(config))
    assert sorted(whole) == list(range(len(rows)))
    # The third row of the second source, all chunks of it.
    numbers = tuple(np.flatnonzero(every.source_rows == 4).tolist())
    values = SourceRows.values

    def reading(self: SourceRows, part: Any) -> Any:
        for value in values(self, part):
            read.append(value)
            yield value

    monkeypatch.setattr(SourceRows, "values", reading)
    found = dict(replace(rows, numbers=numbers).columns(config))
    assert found == {at: whole[number] for at, number in enumerate(numbers)}
    assert len(found) > 1
    assert found[0]["text"].count(" 2 ") == 1
    assert len(read) == 3


def test_rows_that_were_chosen_by_another_seed_have_a_fingerprint_of_their_own(
    preparing: Preparing, put: Write, mix: Any
) -> None:
    """Scores are kept by numbers, which count the chosen rows. All rows have the fingerprint of earlier versions."""
    file = put("rows.jsonl", lines([{"text": f"number {number}"} for number in range(20)]))
    for data, names in (({"source": file, "eval_ratio": 0.3}, ("train", "eval")), ({"mix": mix}, ("train",))):
        dataset, config = preparing.dataset(**data), preparing.config(**data)
        for name in names:
            splits = [getattr(dataset.splits(config.data, seed=seed), name) for seed in (0, 1, 0)]
            first, other, again = (replace(rows_of(dataset, split), name=name).fingerprint for split in splits)
            assert first == again
            assert first != other
            assert ids(splits[0]) != ids(splits[1]), "or they may be one"
    whole = preparing.dataset(file)
    every = whole.splits(preparing.config(file).data, seed=3).train
    assert rows_of(whole, every).fingerprint == f"{whole.content}/train"
    # One row in the place of another changes it too, and so does their order.
    last, first = (np.array([*range(19), 18]), np.arange(20)[::-1])
    assert len({rows_of(whole, every.take(rows)).fingerprint for rows in (np.arange(20), last, first)}) == 3
