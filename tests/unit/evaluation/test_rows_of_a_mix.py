"""Rows of one tokenizer found again with another, for a baseline with a tokenizer of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.errors import DataError
from finray.evaluation.rows import Rows
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture
def mix(put: Write) -> list[dict[str, Any]]:
    """Two rows three times each, and two of six, each of which is a long text in several chunks."""
    few = put("few.jsonl", lines([{"text": "few one"}, {"text": "few two"}]))
    many = put("many.jsonl", lines([{"text": f"{TEXT} {number} {TEXT}"} for number in range(6)]))
    return [{"source": str(few), "count": 6}, {"source": str(many), "count": 5}]


def rows_of(dataset: PreparedDataset, split: PreparedSplit) -> Rows:
    return Rows("train", split, tuple(range(len(split))), dataset, False, None, "train")


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
