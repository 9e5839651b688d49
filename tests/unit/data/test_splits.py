"""Rows held out by ratio and by group, and sources mixed by weight and by count."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finray.data.dataset.prepared import Splits
from finray.data.sampling.splits import Chosen, hold_out, mixed, sample, sizes_of_mix
from finray.data.sources import pieces
from finray.errors import DataError
from tests.support.examples import examples
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

_groups = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 6), min_size=1, max_size=80)
_ratios = st.sampled_from([0.0, 0.001, 0.05, 0.1, 0.25, 0.45])
_seeds = st.integers(0, 2**63 - 1)


def sides(chosen: Chosen) -> list[set[int]]:
    return [set(side.tolist()) for side in (chosen.train, chosen.eval, chosen.test)]


@settings(max_examples=examples(300), deadline=None)
@given(groups=_groups, eval_ratio=_ratios, test_ratio=_ratios, seed=_seeds)
def test_held_out_rows(groups: list[int], eval_ratio: float, test_ratio: float, seed: int) -> None:
    array = np.array(groups, dtype=np.int64)
    sizes = Counter(groups)
    asked = [True, eval_ratio > 0, test_ratio > 0]
    options: dict[str, Any] = {"eval_ratio": eval_ratio, "test_ratio": test_ratio, "seed": seed}
    if len(sizes) < sum(asked):
        with pytest.raises(DataError, match="cannot be split"):
            hold_out(array, **options)
        return
    chosen = hold_out(array, **options)
    train, held, test = found = sides(chosen)
    # Disjoint and complete, in source order, one row at least.
    assert sum(map(len, found)) == len(groups)
    assert train | held | test == set(range(len(groups)))
    assert [bool(side) for side in found] == asked
    for side in (chosen.train, chosen.eval, chosen.test):
        assert side.tolist() == sorted(side.tolist())
    # A group never straddles, and a share is met within one group.
    owners = [{groups[row] for row in side} for side in found]
    assert not owners[0] & owners[1]
    assert not owners[0] & owners[2]
    assert not owners[1] & owners[2]
    largest = max(sizes.values())
    for side, ratio in ((held, eval_ratio), (test, test_ratio)):
        if ratio and len(sizes) > 20:
            assert abs(len(side) - round(len(groups) * ratio)) <= max(largest, 1)
    again = hold_out(array, **options)
    assert sides(again) == found


@settings(max_examples=examples(200), deadline=None)
@given(groups=_groups, order=st.randoms(use_true_random=False), seed=_seeds)
def test_the_side_of_a_group_does_not_depend_on_the_order_of_its_rows(groups: list[int], order: Any, seed: int) -> None:
    assume(len(set(groups)) > 2)

    def side_of(rows: list[int]) -> dict[int, int]:
        found = sides(hold_out(np.array(rows, dtype=np.int64), eval_ratio=0.2, test_ratio=0.2, seed=seed))
        return {rows[at]: number for number, side in enumerate(found) for at in side}

    shuffled = list(groups)
    order.shuffle(shuffled)
    assert side_of(shuffled) == side_of(groups)


def test_a_ratio_of_two_or_more_is_a_number_of_rows() -> None:
    found = sides(hold_out(np.arange(100), eval_ratio=7, test_ratio=0.1, seed=3))
    assert [len(side) for side in found] == [83, 7, 10]
    # The same rows as the share that comes to as many.
    assert found == sides(hold_out(np.arange(100), eval_ratio=0.07, test_ratio=0.1, seed=3))
    for eval_ratio, test_ratio, where in ((100, 0, "eval_ratio"), (0, 500, "test_ratio"), (90, 0.1, "eval_ratio")):
        with pytest.raises(DataError, match="leave none of 100 for training") as caught:
            hold_out(np.arange(100), eval_ratio=eval_ratio, test_ratio=test_ratio, seed=3)
        assert caught.value.where == f"data.{where}"


def test_every_row_is_held_out_by_some_seed() -> None:
    held = [sides(hold_out(np.arange(20), eval_ratio=0.2, test_ratio=0, seed=seed))[1] for seed in range(60)]
    assert set.union(*held) == set(range(20))
    assert len({tuple(sorted(side)) for side in held}) > 50


# --- through a preparation ------------------------------------------------------------------------------------------


def by_user(count: int) -> list[dict[str, Any]]:
    return [{"text": f"{at} of {at % 7}", "who": {"name": f"user {at % 7}"}} for at in range(count)]


def users(preparing: Preparing, split: Any) -> set[str]:
    return {text.rsplit(" ", 1)[1] for text in preparing.said(split)}


@pytest.mark.parametrize("size", [100, 10**6])
def test_a_group_column_keeps_groups_on_one_side(
    preparing: Preparing, put: Write, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    source = put("rows.jsonl", lines(by_user(70)))
    ratios = {"eval_ratio": 0.2, "test_ratio": 0.2}
    splits = preparing.splits(source, group_by="who.name", **ratios)
    train, held, test = (users(preparing, one) for one in (splits.train, splits.eval, splits.test))
    assert len(splits.train) == 50
    assert (len(train), len(held), len(test)) == (5, 1, 1)
    assert len(train | held | test) == 7
    # Negative control: without the column every user is on both sides.
    mixed_up = preparing.splits(source, **ratios)
    assert users(preparing, mixed_up.train) & users(preparing, mixed_up.eval)
    if size == 100:
        monkeypatch.setattr(pieces, "PIECE_BYTES", 10**6)
        assert preparing.said(preparing.splits(source, group_by="who.name", **ratios).eval) == preparing.said(
            splits.eval
        )


def test_rows_that_say_the_same_stay_on_one_side(preparing: Preparing, put: Write) -> None:
    """A held-out row that was trained on would count as one that nobody has seen."""
    twice = [{"text": f"row {at % 20}", "id": at} for at in range(40)]
    splits = preparing.splits(put("rows.jsonl", lines(twice)), eval_ratio=0.3, test_ratio=0.2)
    train, held, test = (preparing.said(side) for side in (splits.train, splits.eval, splits.test))
    assert [len(side) for side in (train, held, test)] == [20, 12, 8]
    assert not set(train) & set(held) | set(train) & set(test) | set(held) & set(test)


@pytest.mark.parametrize(("row", "message"), [({"text": "x"}, "is missing"), ({"text": "x", "who": None}, "is null")])
def test_a_row_without_a_group_is_bad(preparing: Preparing, put: Write, row: dict[str, Any], message: str) -> None:
    source = put("rows.jsonl", lines([{"text": "a", "who": 1}, {"text": "b", "who": 2}, row]))
    options = {"group_by": "who", "eval_ratio": 0.5}
    error = preparing.refused(source, **options)
    assert (error.where, message in error.message) == (f"{source}:3", True)
    splits = preparing.splits(source, on_bad_row="drop", **options)
    assert len(preparing.said(splits.train)) == len(preparing.said(splits.eval)) == 1


def test_pieces_of_a_long_text_stay_on_one_side(preparing: Preparing, put: Write) -> None:
    source = put("rows.jsonl", lines([{"text": f"{at} " * 200} for at in range(10)]))
    splits = preparing.splits(source, eval_ratio=0.3)
    assert splits.eval is not None
    assert len(splits.eval) > 6
    assert not set(splits.eval.source_rows.tolist()) & set(splits.train.source_rows.tolist())


def test_a_saved_data_set_of_one_split_does_not_evaluate_on_its_training_rows(
    preparing: Preparing, tmp_path: Any
) -> None:
    datasets.Dataset.from_list(by_user(5)).save_to_disk(str(tmp_path / "saved"))
    preparing.refused(tmp_path / "saved", eval_split="validation")


def test_slices_of_the_same_files_that_only_touch_are_two_splits(preparing: Preparing, put: Write) -> None:
    source = put("rows.jsonl", lines(by_user(20)))
    splits = preparing.splits(source, train_split="train[:12]", eval_split="train[12:15]", test_split="train[15:]")
    assert [len(preparing.said(one)) for one in (splits.train, splits.eval, splits.test)] == [12, 3, 5]
    error = preparing.refused(source, train_split="train[:12]", eval_split="train[12:16]", test_split="train[15:]")
    assert "the test would use rows of evaluation" in error.message
    assert error.where == "data.test_split"
    error = preparing.refused(source, train_split="train[12:]", eval_split="train[:13]")
    assert "evaluation would use rows of training" in error.message
    assert error.where == "data.eval_split"


def test_slices_of_sources_that_share_some_files_are_taken_for_the_whole(preparing: Preparing, put: Write) -> None:
    """Where the rows of one lie in the other is not looked up."""
    one, other = (put(f"set/{name}.jsonl", lines(by_user(10))) for name in "ab")
    error = preparing.refused(
        one.parent, train_split="train[:5]", eval_source=str(other), eval_split="train[5:]", max_length=32
    )
    assert error.where == "data.eval_source"
    # A slice of one file against the whole of it.
    preparing.refused(one, train_split="train[:5]", eval_source=str(one))
    preparing.refused(one, eval_source=str(one), eval_split="train[5:]")
    assert len(preparing.splits(one, train_split="train[:5]", eval_source=str(other)).train) == 5
    # What is trained on may be named twice.
    assert len(preparing.splits(mix=[{"source": str(one)}, {"source": str(one)}]).train) == 20


def test_of_several_sources_the_one_without_a_format_is_named(preparing: Preparing, put: Write) -> None:
    odd = put("odd.jsonl", lines([{"q": "x"}]))
    message = preparing.refused(put("rows.jsonl", lines(by_user(4))), eval_source=str(odd)).message
    assert message.startswith("eval (")
    assert "odd.jsonl)" in message
    assert "odd.jsonl" not in preparing.refused(odd).message, "there is no other"


# --- mixes ----------------------------------------------------------------------------------------------------------

_sizes = st.lists(st.integers(1, 500), min_size=1, max_size=6)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), available=_sizes)
def test_sizes_of_a_mix(data: Any, available: list[int]) -> None:
    kinds = data.draw(
        st.lists(
            st.tuples(st.floats(0.001, 1000), st.none())
            | st.tuples(st.none(), st.integers(1, 900))
            | st.just((None, None)),
            min_size=len(available),
            max_size=len(available),
        )
    )
    weights, counts = [weight for weight, _ in kinds], [count for _, count in kinds]
    wanted = sizes_of_mix(available, weights, counts)
    weighed = [at for at, weight in enumerate(weights) if weight is not None]
    total = sum(available[at] for at in weighed)
    assert sum(wanted[at] for at in weighed) == total
    for at, (weight, count) in enumerate(kinds):
        if count is not None:
            assert wanted[at] == count
        elif weight is None:
            assert wanted[at] == available[at]
        else:
            assert abs(wanted[at] - total * weight / math.fsum(weights[at] for at in weighed)) < 1.001


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), available=_sizes, seed=_seeds)
def test_rows_of_a_mix(data: Any, available: list[int], seed: int) -> None:
    streams = np.repeat(np.arange(len(available)), available)
    wanted = data.draw(st.lists(st.integers(0, 1200), min_size=len(available), max_size=len(available)))
    rows = mixed(streams, wanted, seed=seed)
    assert rows.tolist() == mixed(streams, wanted, seed=seed).tolist()
    for stream, (count, size) in enumerate(zip(wanted, available, strict=True)):
        times = Counter(row for row in rows.tolist() if streams[row] == stream)
        assert sum(times.values()) == count
        # Each as often as the others, within one.
        often = [times[row] for row in np.flatnonzero(streams == stream).tolist()]
        assert len(often) == size
        assert max(often) - min(often) <= 1


# --- pinned: a change here changes which rows existing runs hold out and train on -------------------------------------

GROUPS = np.array([5, 5, 1, 2, 3, 3, 3, 9, 8, 7, 7, 4])


@pytest.mark.parametrize(
    ("eval_ratio", "test_ratio", "seed", "held_out", "tested"),
    [(0.25, 0.17, 0, [9, 10], [0, 1]), (0.25, 0.17, 7, [8, 9, 10], [3, 11]), (0.0, 0.3, 3, [], [2, 8, 9, 10])],
)
def test_the_held_out_rows_are_pinned(
    eval_ratio: float, test_ratio: float, seed: int, held_out: list[int], tested: list[int]
) -> None:
    chosen = hold_out(GROUPS, eval_ratio=eval_ratio, test_ratio=test_ratio, seed=seed)
    assert (chosen.eval.tolist(), chosen.test.tolist()) == (held_out, tested)


@given(count=st.integers(0, 60), most=st.integers(1, 70), more=st.integers(0, 70), seed=_seeds)
def test_a_larger_sample_holds_the_smaller_one(count: int, most: int, more: int, seed: int) -> None:
    few, many = (sample(count, size, seed=seed).tolist() for size in (most, most + more))
    assert few == sorted(set(few))
    assert len(few) == min(count, most)
    assert set(few) <= set(many) <= set(range(count))
    assert sample(count, None, seed=seed).tolist() == list(range(count))


def test_the_rows_of_a_sample_are_pinned_and_follow_from_the_seed() -> None:
    assert sample(8, 3, seed=17).tolist() == [1, 4, 6]
    # Every row is in some sample, and none in all: without the seed these would be the same three rows.
    drawn = [set(sample(8, 3, seed=seed).tolist()) for seed in range(40)]
    assert set.union(*drawn) == set(range(8))
    assert not set.intersection(*drawn)


@pytest.mark.parametrize(("seed", "again"), [(0, [1, 3]), (7, [2, 3])])
def test_the_rows_of_a_mix_are_pinned(seed: int, again: list[int]) -> None:
    """Of four, three and one row, six, two and three: whole rounds first, then a choice."""
    found = mixed(np.array([0, 0, 0, 0, 1, 1, 1, 2]), [6, 2, 3], seed=seed)
    assert found.tolist() == [0, 1, 2, 3, *again, 5, 6, 7, 7, 7]


@pytest.mark.parametrize(
    ("available", "weights", "counts", "wanted"),
    [
        ([10, 20, 30], [None, 2.0, 1.0], [4, None, None], [4, 33, 17]),
        # The largest remainder, and of equal ones the first source.
        ([10, 3, 1], [0.5, 0.3, 0.2], [None, None, None], [7, 4, 3]),
        ([5, 5], [1.0, 1.0], [None, None], [5, 5]),
        ([4, 3], [1.0, 1.0], [None, None], [4, 3]),
    ],
)
def test_the_sizes_of_a_mix_are_pinned(
    available: list[int], weights: list[float | None], counts: list[int | None], wanted: list[int]
) -> None:
    assert sizes_of_mix(available, weights, counts) == wanted


def test_a_source_without_rows_can_only_give_none() -> None:
    assert mixed(np.array([0, 0]), [1, 0], seed=0).shape == (1,)
    with pytest.raises(DataError, match="no rows left to mix") as caught:
        mixed(np.array([0, 0]), [1, 2], seed=0)
    assert caught.value.where == "data.mix.1"


@pytest.mark.parametrize(
    ("groups", "eval_ratio", "test_ratio", "said", "where"),
    [
        ([1], 0.5, 0.0, "one row cannot", "data.eval_ratio"),
        ([1, 1], 0.0, 0.5, "1 group of rows cannot", "data.test_ratio"),
        ([1, 1, 2], 0.3, 0.3, "2 groups of rows cannot", "data.eval_ratio"),
    ],
)
def test_too_few_groups_to_split_are_counted(
    groups: list[int], eval_ratio: float, test_ratio: float, said: str, where: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        hold_out(np.array(groups), eval_ratio=eval_ratio, test_ratio=test_ratio, seed=0)
    assert caught.value.where == where


def mix_of(preparing: Preparing, put: Write, *settings: dict[str, Any], **data: Any) -> tuple[Splits, list[int]]:
    """A mix of 40 and 20 rows; the splits, and training rows of each source."""
    sources = [put("a.jsonl", lines([{"text": f"a {at}"} for at in range(40)]))]
    sources.append(put("b.csv", "body,n\n" + "".join(f"b {at},{at}\n" for at in range(20))))
    mix: list[dict[str, Any]] = [{"source": str(source), **own} for source, own in zip(sources, settings, strict=True)]
    mix[1]["field_mapping"] = {"text": "body"}
    splits = preparing.splits(mix=mix, **data)
    counted = Counter(text[0] for text in preparing.said(splits.train))
    return splits, [counted["a"], counted["b"]]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (({}, {}), [40, 20]),
        (({"weight": 1}, {"weight": 1}), [30, 30]),
        (({"weight": 9}, {"weight": 1}), [54, 6]),
        (({"count": 10}, {"count": 45}), [10, 45]),
        (({"count": 10}, {}), [10, 20]),
        (({"count": 7}, {"weight": 3}), [7, 20]),
    ],
)
def test_two_sources_are_mixed_by_weight_and_count(
    preparing: Preparing, put: Write, settings: tuple[dict[str, Any], ...], wanted: list[int]
) -> None:
    splits, found = mix_of(preparing, put, *settings)
    assert found == wanted
    again, _ = mix_of(preparing, put, *settings)
    assert preparing.said(again.train) == preparing.said(splits.train)
    times = Counter(preparing.said(splits.train))
    for letter, size, count in (("a", 40, wanted[0]), ("b", 20, wanted[1])):
        often = [times[f"{letter} {at}"] for at in range(size)]
        assert (min(often), max(often)) == (count // size, -(-count // size))


def test_rows_are_held_out_before_they_are_mixed(preparing: Preparing, put: Write) -> None:
    splits, found = mix_of(preparing, put, {"weight": 1}, {"weight": 1}, eval_ratio=0.25)
    assert found == [22, 23] or found == [23, 22]
    held = preparing.said(splits.eval)
    assert len(set(held)) == len(held) == 15
    assert not set(held) & set(preparing.said(splits.train))


def test_another_weight_needs_no_new_tokens_but_other_rows_do(preparing: Preparing, put: Write) -> None:
    first, second = (put(f"{name}.jsonl", lines([{"text": name}] * 3)) for name in "ab")

    def name(weight: float, **own: Any) -> str:
        mix = [{"source": str(first), "weight": weight}, {"source": str(second), "weight": 1, **own}]
        return preparing.dataset(mix=mix).name

    assert name(1) == name(5)
    assert name(1) != name(1, split="train[:2]")


def test_a_count_that_repeats_few_rows_beyond_reason_is_refused() -> None:
    streams = np.zeros(60, dtype=np.int64)
    assert len(mixed(streams, [60_000], seed=1)) == 60_000
    with pytest.raises(DataError, match="100,000,000 rows per epoch were requested from a source with 60"):
        mixed(streams, [100_000_000], seed=1)
