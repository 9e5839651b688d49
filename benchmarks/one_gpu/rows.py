"""Rows of random tokens with the lengths of Alpaca's, and steps made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from finray.data.sampling.collate import collate
from finray.data.sampling.packing import plan_packs
from finray.training.loader import StepData
from harness.rows import make_rows

# (ids, mask) of a row; the mask is one where the token is learned.
Row = tuple[Any, Any]
# Rows of a batch that is not packed.
ROWS = 8


def count_pieces(text: str) -> int:
    """Words and full stops, which the made-up rows count as a token each."""
    return len(re.findall(r"\w+|\.", text))


def draw_rows(tokens: int, vocabulary: int, longest: int, *, seed: int) -> list[Row]:
    """Rows of together at least so many tokens, of prompts and answers with Alpaca's lengths; answers are learned."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    total = 0
    # Alpaca's rows have some 170 tokens on average.
    for row in make_rows(tokens // 100 + 50, seed=seed):
        prompt, answer = (count_pieces(message["content"]) for message in row["messages"])
        # One more token for the end of the answer.
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [prompt, answer + 1])[:longest]
        rows.append((generator.integers(0, vocabulary, len(mask), dtype=np.int32), mask))
        total += len(mask)
        if total >= tokens:
            return rows
    raise ValueError(f"too few rows were made for {tokens} tokens")


def packed_steps(rows: Sequence[Row], capacity: int, *, steps: int, packs: int, seed: int) -> list[StepData]:
    """Optimizer steps of so many packs each, drawn without replacement as long as there are any left."""
    plan = plan_packs([len(ids) for ids, _ in rows], capacity)
    generator = np.random.default_rng(seed)
    rounds = -(-steps * packs // len(plan))
    order = np.concatenate([generator.permutation(len(plan)) for _ in range(rounds)]).tolist()
    groups = [[plan.pack(pack) for pack in order[at * packs : (at + 1) * packs]] for at in range(steps)]
    return [_step(rows, group) for group in groups]


def loose_steps(rows: Sequence[Row], *, steps: int, tokens: int) -> list[StepData]:
    """Optimizer steps of about so many tokens, in batches of `ROWS` rows."""
    found: list[StepData] = []
    numbers = iter(list(range(len(rows))) * 3)
    while len(found) < steps:
        group: list[tuple[int, ...]] = []
        held = 0
        while held < tokens:
            batch = tuple(next(numbers) for _ in range(ROWS))
            held += sum(len(rows[number][0]) for number in batch)
            group.append(batch)
        found.append(_step(rows, group))
    return found


def _step(rows: Sequence[Row], groups: Sequence[tuple[int, ...]]) -> StepData:
    """A step of one batch for each group of rows."""
    batches = [collate([rows[number] for number in numbers], numbers) for numbers in groups]
    return StepData(
        shares=list(enumerate(batches)),
        supervised=sum(len(batch.targets_K) for batch in batches),
        tokens=sum(batch.tokens for batch in batches),
        samples=tuple(number for numbers in groups for number in numbers),
        items=len(batches),
    )
