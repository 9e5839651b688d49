"""Keys and values in slots, and branches of one context: what each token sees, against a loop over single queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from finray.models.attention import Scores
from finray.models.slots import Branches, Laid, Prefill, Slots, Step

HEADS, SHARED, KEY, VALUE = 4, 2, 8, 6
CPU = torch.device("cpu")
SCORES = [
    Scores(),
    Scores(scaling=0.5),
    Scores(window=1),
    Scores(window=3),
    Scores(softcap=0.7),
    Scores(window=3, sinks=torch.tensor([3.0, 0.5, -1.0, -40.0])),
    Scores(scaling=0.4, window=2, softcap=1.5),
]


def drawn(length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (1, heads, length, width) of packed tokens."""
    return (
        torch.randn(1, HEADS, length, KEY, generator=generator) * 2,
        torch.randn(1, SHARED, length, KEY, generator=generator) * 2,
        torch.randn(1, SHARED, length, VALUE, generator=generator),
    )


def by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
    """What one token (H, D) sees of a row (H_kv, L, D) that it is the last of: (H, D)."""
    found = []
    for head in range(HEADS):
        own = head * SHARED // HEADS
        at = keys.shape[1] - (scores.window or keys.shape[1])
        row, seen = keys[own, max(at, 0) :].double(), values[own, max(at, 0) :].double()
        products = row @ query[head].double() * (KEY**-0.5 if scores.scaling is None else scores.scaling)
        if scores.softcap is not None:
            products = scores.softcap * torch.tanh(products / scores.softcap)
        sink = 0.0 if scores.sinks is None else scores.sinks[head].double().exp()
        found.append(products.exp() / (products.exp().sum() + sink) @ seen)
    return torch.stack(found).float()


class Row:
    """All keys and values of a row so far, in two layers."""

    def __init__(self) -> None:
        self.layers = [(torch.zeros(SHARED, 0, KEY), torch.zeros(SHARED, 0, VALUE)) for _ in range(2)]

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layers[layer]
        self.layers[layer] = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        return self.layers[layer]

    def __len__(self) -> int:
        return self.layers[0][0].shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_each_token_sees_its_own_row_whatever_was_in_its_slot_before(scores: Scores, dtype: torch.dtype) -> None:
    """Rows come, grow by a token each, end, and free their slots for others; prompts reuse known keys and values."""
    generator = torch.Generator().manual_seed(0)
    # Scores are rounded to bf16, so they are small here.
    near, scale = ({"rtol": 1e-4, "atol": 1e-5}, 1.0) if dtype == torch.float32 else ({"rtol": 2e-2, "atol": 2e-2}, 0.5)
    slots, rows = Slots(3), list[Row]()
    # Of each pass: the row that ends before it, and tokens of rows that come.
    for ends, coming in ((None, [5, 2]), (None, []), (0, [80]), (None, [3]), (1, []), (0, [1, 2])):
        if ends is not None:
            last = rows.pop()
            if ends < len(rows):
                rows[ends] = last
                slots.move(len(rows), ends, len(last))
        slots.reserve(max([len(row) + 1 for row in rows] + coming))
        prefills, at = [], len(rows)
        for nth, length in enumerate(coming):
            prefills.append(Prefill(at + nth, 0, length))
        step = Step(slots, [len(row) for row in rows], prefills, CPU)
        total, working = len(rows) + sum(coming), len(rows)
        rows += [Row() for _ in coming]
        for layer in range(2):
            query, key, value = ((one * scale).to(dtype) for one in drawn(total, generator))
            found = step.attend(query, key, value, scores)
            assert (found.shape, found.dtype) == ((1, total, HEADS, VALUE), dtype)
            owners = [
                *rows[:working],
                *(row for row, length in zip(rows[working:], coming, strict=True) for _ in range(length)),
            ]
            for token, row in enumerate(owners):
                seen = row.add(layer, key[0, :, token : token + 1], value[0, :, token : token + 1])
                expected = by_hand(query[0, :, token], *seen, scores)
                torch.testing.assert_close(found[0, token].float(), expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_a_prompt_goes_on_from_what_its_slot_knows(scores: Scores, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    slots, row = Slots(2), Row()
    slots.reserve(9)
    # Scores are rounded to bf16, so they are small here.
    near, scale = ({"rtol": 1e-4, "atol": 1e-5}, 1.0) if dtype == torch.float32 else ({"rtol": 2e-2, "atol": 2e-2}, 0.5)
    for start, length in ((0, 5), (5, 4)):
        query, key, value = ((one * scale).to(dtype) for one in drawn(length, generator))
        found = Step(slots, [], [Prefill(1, start, length)], CPU).attend(query, key, value, scores)
        for token in range(length):
            seen = row.add(0, key[0, :, token : token + 1], value[0, :, token : token + 1])
            expected = by_hand(query[0, :, token], *seen, scores)
            torch.testing.assert_close(found[0, token].float(), expected, **near)


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_branches_see_their_context_and_not_each_other(scores: Scores) -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = [(4, [3, 1]), (1, []), (2, [2])]
    total = sum(context + sum(own) for context, own in lengths)
    query, key, value = drawn(total, generator)
    found = Branches(lengths).attend(query, key, value, scores)
    assert found.shape == (1, total, HEADS, VALUE)
    at = 0
    for context, continuations in lengths:
        stem = list(range(at, at + context))
        at += context
        pieces = [(stem[: nth + 1], place) for nth, place in enumerate(stem)]
        for length in continuations:
            pieces += [(stem + list(range(at, at + nth + 1)), at + nth) for nth in range(length)]
            at += length
        for seen, token in pieces:
            expected = by_hand(query[0, :, token], key[0][:, seen], value[0][:, seen], scores)
            torch.testing.assert_close(found[0, token], expected, rtol=1e-4, atol=1e-5)


def test_slots_grow_and_keep_what_they_hold() -> None:
    slots = Slots(2)
    slots.reserve(5)
    key, value = torch.randn(1, SHARED, 1, KEY), torch.randn(1, SHARED, 1, VALUE)
    keys, values = slots.layer(0, key, value)
    last = slots.capacity - 1
    assert not keys.any()
    assert not values.any(), "what is masked must be a number"
    keys[1, :, last], values[1, :, last] = 2.0, 3.0
    slots.reserve(slots.capacity)
    assert slots.layer(0, key, value)[0] is keys
    slots.reserve(1001)
    keys, values = slots.layer(0, key, value)
    assert (keys.shape[2], slots.capacity) == (1001, 1001)
    assert (float(keys[1, 0, last, 0]), float(keys.sum())) == (2.0, 2.0 * SHARED * KEY)
    assert float(values.sum()) == 3.0 * SHARED * VALUE
    # By a quarter at least.
    slots.reserve(1002)
    assert slots.capacity == 1251


def test_the_first_tokens_of_the_first_slot_are_shared_with_all_others() -> None:
    slots = Slots(3)
    slots.reserve(4)
    for layer in range(2):
        keys, values = slots.layer(layer, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        keys[0], values[0] = 5.0 + layer, 7.0 + layer
    slots.share(2)
    for layer, (keys, values) in enumerate(slots.layers):
        for slot in (1, 2):
            assert keys[slot, 0, :4, 0].tolist() == [5 + layer, 5 + layer, 0, 0]
            assert values[slot, 0, :4, 0].tolist() == [7 + layer, 7 + layer, 0, 0]


def test_pieces_are_laid_end_to_end_with_their_positions() -> None:
    layout = Branches([(3, [2])])
    laid = Laid.of([([7, 8, 9], 0), ([4, 5], 3)], layout, CPU)
    assert laid.tokens_1T.tolist() == [[7, 8, 9, 4, 5]]
    assert laid.positions_1T.tolist() == [[0, 1, 2, 3, 4]]
    assert laid.lengths == (3, 2)
    assert laid.cu_seqlens.tolist() == [0, 3, 5]
    assert (laid.tokens_1T.dtype, laid.positions_1T.dtype, laid.cu_seqlens.dtype) == (
        *(torch.int64, torch.int64),
        torch.int32,
    )
    assert laid.layout is layout
    assert Laid.of([(np.array([1], dtype=np.int32), 9)], layout, CPU).positions_1T.tolist() == [[9]]
