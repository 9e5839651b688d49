"""The largest micro-batch that training would form from rows."""

from __future__ import annotations

from typing import Any

from finray.planning.setup import Workload
from finray.planning.workload import largest_workload


def largest(lengths: list[int], **fields: Any) -> Workload:
    options: dict[str, Any] = {
        "max_length": 100,
        "packing": True,
        "micro_batch_size": 1,
        "learned": 0.5,
        "micro_batches": 1000,
        "accumulates": True,
        "weigh": sum,
    }
    return largest_workload(lengths, **{**options, **fields})


def test_without_packing_the_longest_row() -> None:
    found = largest([10, 70, 30], packing=False)
    assert (found.rows, found.targets, found.token_counts, found.row_lengths) == ((70,), 35, 3, 3)


def test_packs_are_full_and_rows_are_cut() -> None:
    assert largest([60, 40, 10]).tokens == 100
    assert largest([250], packing=False).rows == (100,)


def test_the_heaviest_is_what_weighs_most_and_not_what_is_longest() -> None:
    rows = [100] + [10] * 10
    assert largest(rows, weigh=lambda lengths: sum(n * n for n in lengths)).rows == (100,)
    assert largest(rows, weigh=len).rows == (10,) * 10


def test_micro_batches_of_several_packs() -> None:
    assert largest([50] * 4, packing=False, micro_batch_size=2).tokens == 100
    assert largest([50] * 4, packing=True, micro_batch_size=2).tokens == 200


def test_no_more_shapes_than_micro_batches_are_met() -> None:
    lengths = list(range(10, 60))
    assert largest(lengths, packing=False).token_counts == 50
    assert largest(lengths, packing=False, micro_batches=3).token_counts == 3


def test_unknown_lengths_are_full_rows() -> None:
    assert largest([], micro_batch_size=3).rows == (100, 100, 100)


def test_everything_learned_leaves_out_first_tokens() -> None:
    assert largest([60, 40], learned=1.0).targets == 98
