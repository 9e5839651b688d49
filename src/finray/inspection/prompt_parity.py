"""Whether what is trained continues exactly the prompt that a server will render.

A server gets the messages before an answer, renders them with ``add_generation_prompt=True`` and tokenises only that.
The training row must begin with the same token ids, up to where learning starts; otherwise the model is given a prompt
that it has never been trained on. Preparation refuses conversations whose text differs, except with
``data.train_on: all``; token ids are compared only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.inspection.tokens import Stretch, shortened, token_views

_SHOWN_KINDS = 8
# Aligning two prompts takes time in proportion to the product of their lengths.
_ALIGNED = 4_000_000
_CONTEXT = 24

# The number of an answer's message, from 0, and the token ids of the prompt that a server is given for it.
ServedPrompt = tuple[int, list[int]]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A prepared row and the prompts that a server would be given for it.

    Attributes:
        where: source of the row.
        ids, mask: the row, int32 and uint8.
        prompts: the served prompt of every answer; none for text.
        refusal: why the chat template refuses to render the prompt of an answer; empty if it does not.
    """

    where: str
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    prompts: Sequence[ServedPrompt]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """One way in which prompts differ, with an example.

    Attributes:
        count: answers that differ in this way.
        where: source of the example.
        turn: number of the answer's message, from 0.
        position: number of the first token that differs, from 0.
        stretches: both prompts, aligned.
    """

    count: int
    where: str
    turn: int
    position: int
    stretches: tuple[Stretch, ...]

    def text(self, prompt: str) -> str:
        """The ``trained`` or the ``served`` prompt as text."""
        return "".join(
            token.text for stretch in self.stretches if stretch.kind in ("same", prompt) for token in stretch.tokens
        )

    def excerpt(self) -> list[Stretch]:
        """Both prompts, aligned, with what they have in common shortened to what is next to a difference."""
        last = len(self.stretches) - 1
        return [
            short
            for at, one in enumerate(self.stretches)
            for short in (
                shortened(one.tokens, _CONTEXT * (at > 0), _CONTEXT * (at < last)) if one.kind == "same" else [one]
            )
        ]


@dataclass(frozen=True, slots=True)
class PromptParity:
    """The outcome of the comparison.

    Attributes:
        rows, of: rows that were compared, and rows in total.
        turns: answers that were compared.
        matching: answers whose prompt is the served one, token by token.
        without_prompt: rows without a prompt (plain text).
        refused: rows for which the chat template refuses to render a prompt.
        refusal: its first message.
        differences: kinds of differences, the most frequent first.
    """

    rows: int = 0
    of: int = 0
    turns: int = 0
    matching: int = 0
    without_prompt: int = 0
    refused: int = 0
    refusal: str = ""
    differences: tuple[PromptDifference, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every compared answer continues the served prompt."""
        return self.matching == self.turns and not self.refused


def compare_prompts(
    rows: Iterable[ServedRow], *, of: int, whole: bool, tokenizer: Any, special: frozenset[int]
) -> PromptParity:
    """Compare rows with the prompts that a server is given.

    Args:
        rows: the rows to compare.
        of: number of rows in total.
        whole: whether all tokens are learned, prompts included.
        tokenizer: the Transformers tokenizer, to show tokens.
        special: ids of its special tokens.
    """
    compared = turns = matching = without = refused = 0
    refusal = ""
    kinds: dict[Any, PromptDifference] = {}
    for row in rows:
        compared += 1
        without += not row.prompts and not row.refusal
        if row.refusal and (whole or not row.prompts):
            refused, refusal = refused + 1, refusal or row.refusal
        ids = row.ids.tolist()
        for before, turn, prompt in _whole_row(ids, row) if whole else _learned_spans(ids, row):
            turns += 1
            if before == prompt:
                matching += 1
                continue
            start = _common(before, prompt)
            # A row that is learned whole goes on with the answer, so only the served side tells kinds apart.
            kind = (None if whole else tuple(before[start : start + 1]), tuple(prompt[start : start + 1]))
            if kind in kinds:
                kinds[kind] = replace(kinds[kind], count=kinds[kind].count + 1)
                continue
            ours, theirs = (token_views(side, [0] * len(side), tokenizer, special) for side in (before, prompt))
            changes = [("equal", 0, start, 0, start), ("replace", start, len(before), start, len(prompt))]
            if not whole and len(before) * len(prompt) <= _ALIGNED:
                changes = list(SequenceMatcher(None, before, prompt, autojunk=False).get_opcodes())
            stretches = [
                stretch
                for tag, one, two, three, four in changes
                for stretch in (
                    [Stretch("same", ours[one:two])]
                    if tag == "equal"
                    else [Stretch("trained", ours[one:two]), Stretch("served", theirs[three:four])]
                )
                if stretch.tokens
            ]
            kinds[kind] = PromptDifference(1, row.where, turn, start, tuple(stretches))
    ordered = sorted(kinds.values(), key=lambda difference: -difference.count)[:_SHOWN_KINDS]
    return PromptParity(compared, of, turns, matching, without, refused, refusal, tuple(ordered))


def _learned_spans(ids: list[int], row: ServedRow) -> Iterable[tuple[list[int], int, list[int]]]:
    """For each learned span, the tokens before it and the served prompt that they are closest to."""
    if not row.prompts:
        return
    for start in np.flatnonzero(np.diff(row.mask.astype(np.int8), prepend=np.int8(0)) == 1).tolist():
        before = ids[:start]
        yield before, *max(row.prompts, key=lambda one: (_common(before, one[1]), -abs(len(before) - len(one[1]))))


def _whole_row(ids: list[int], row: ServedRow) -> Iterable[tuple[list[int], int, list[int]]]:
    """The beginning of the row for each served prompt, unless the row was cut off inside that prompt."""
    for turn, prompt in row.prompts:
        if prompt[: len(ids)] != ids:
            yield ids[: len(prompt)], turn, prompt


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
