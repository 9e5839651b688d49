"""Prepared rows that are in no file, for tests of what looks at rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from finray.config.load import build_config
from finray.data.sampling.packing import plan_packs
from finray.errors import DataError
from finray.inspection.measure import Inspector
from finray.inspection.prompt_parity import PromptParity, ServedRow, compare_prompts
from finray.inspection.result import Inspection
from finray.inspection.tokens import special_tokens


class ListRows:
    """Rows of a split as lists: token ids and mask of each."""

    def __init__(
        self, rows: Sequence[tuple[list[int], list[int]]], *, file: str = "rows.jsonl", sources: Sequence[int] = ()
    ) -> None:
        self._rows = [(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)) for ids, mask in rows]
        self._file = file
        self.lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int64)
        self.supervised = np.array([sum(mask[1:]) for _, mask in rows], dtype=np.int64)
        self.source_rows = np.array(sources or range(len(rows)), dtype=np.int64)
        self.digests = np.array([hash(tuple(ids)) for ids, _ in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> tuple[Any, Any]:
        return self._rows[number]

    def where(self, number: int) -> str:
        return f"{self._file}:{self.source_rows[number] + 1}"


def completion_row(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """A prompt that is not learned and an answer that is."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return before + after, [0] * len(before) + [1] * len(after)


def chat_row(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """One turn of ChatML; its end token is learned."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids, mask = completion_row(tokenizer, prompt, f"{answer}<|im_end|>")
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return ids + newline, mask + [0] * len(newline)


def parity_of(tokenizer: Any, rows: ListRows, render: Callable[[int], str], *, whole: bool = False) -> PromptParity:
    """Compare every row with one served prompt, ``render(row number)``."""

    def served() -> Any:
        for number in range(len(rows)):
            try:
                prompts, refusal = [(1, tokenizer(render(number), add_special_tokens=False)["input_ids"])], ""
            except DataError as error:
                prompts, refusal = [], error.message
            yield ServedRow(rows.where(number), *rows.row(number), prompts, refusal)

    special = special_tokens(tokenizer).special
    return compare_prompts(served(), of=len(rows), whole=whole, tokenizer=tokenizer, special=special)


def inspect_rows(
    tokenizer: Any,
    splits: dict[str, ListRows],
    *,
    train_on: str = "completion",
    max_length: int = 64,
    parity: PromptParity | None = None,
    counters: dict[str, dict[str, int]] | None = None,
    kind: str = "chat",
    stops: Sequence[int] = (),
    examples: int = 3,
    chosen: Sequence[str] = (),
) -> Inspection:
    """An inspection of rows in memory."""
    plain = {"model": {"name": "tiny"}, "data": {"source": "rows.jsonl", "train_on": train_on}}
    config = build_config(plain, source="test")
    # Shorter than a config may say.
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": max_length})})
    tokens = special_tokens(tokenizer, stops=stops)
    plan = plan_packs(next(iter(splits.values())).lengths, max_length)
    inspector = Inspector(config.data, splits, counters or {}, tokenizer, tokens, plan)
    return Inspection(
        config=config,
        format="messages",
        prepared="prepared",
        splits=inspector.split_views(),
        duplicates=inspector.duplicates(),
        checks=inspector.checks(kind=kind),
        parity=parity or PromptParity(),
        examples=inspector.examples(examples, chosen),
    )
