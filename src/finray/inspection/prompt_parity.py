"""Checks that training continues exactly the prompt that a server will render.

A server gets the messages before an answer, renders them with ``add_generation_prompt=True`` and tokenizes only that.
The training row must begin with the same token ids, up to where learning starts; otherwise the model is given a prompt
that it has never been trained on. Preparation refuses conversations whose text differs, except with
``data.train_on: all``; token ids are compared only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.inspection.tokens import Stretch, shortened, token_views

_SHOWN_KINDS = 8
_CONTEXT = 24

# The number of an answer's message, from 0, and the token ids of the prompt that a server is given for it.
ServedPrompt = tuple[int, list[int]]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A prepared row and the served prompts of its answers; ``refusal`` is why the template refuses one of them, and
    ``in_parts`` whether only parts of an answer are learned."""

    where: str
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    prompts: Sequence[ServedPrompt]
    refusal: str = ""
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """One way in which prompts differ, with an example."""

    count: int  # answers that differ in this way
    where: str  # source of the example
    turn: int  # number of the answer's message, from 0
    position: int  # number of the first token that differs, from 0
    stretches: tuple[Stretch, ...]  # both prompts, aligned at their common beginning and end

    def text(self, prompt: str) -> str:
        """The ``trained`` or the ``served`` prompt as text."""
        shown = [stretch for stretch in self.stretches if stretch.kind in ("same", prompt)]
        return "".join(token.text for stretch in shown for token in stretch.tokens)

    def excerpt(self) -> list[Stretch]:
        """Both prompts, aligned; common stretches are shortened to what is next to a difference."""
        shown: list[Stretch] = []
        last = len(self.stretches) - 1
        for at, stretch in enumerate(self.stretches):
            same = stretch.kind == "same"
            shown += shortened(stretch.tokens, _CONTEXT * (at > 0), _CONTEXT * (at < last)) if same else [stretch]
        return shown


@dataclass(frozen=True, slots=True)
class PromptParity:
    """The outcome of the comparison.

    Attributes:
        rows, of: rows that were compared, and rows in total.
        turns, matching: answers that were compared, and those whose prompt is the served one, token by token.
        refused, refusal: rows for which the chat template refuses to render a prompt, and its first message.
        differences: kinds of differences, the most frequent first.
    """

    rows: int = 0
    of: int = 0
    turns: int = 0
    matching: int = 0
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
    """Compare rows, of so many in total, with the prompts that a server is given.

    Where all tokens are learned (``whole``), so are the prompts.
    """
    compared = turns = matching = refused = 0
    refusal = ""
    kinds: dict[Any, PromptDifference] = {}
    for row in rows:
        compared += 1
        if row.refusal and (whole or not row.prompts):
            refused, refusal = refused + 1, refusal or row.refusal
        for before, turn, prompt in _pairs(row, whole=whole):
            turns += 1
            if before == prompt or (row.in_parts and before[: len(prompt)] == prompt):
                matching += 1
                continue
            start = _common(before, prompt)
            # A row that is learned whole continues with the answer, so only the served side tells kinds apart.
            kind = (None if whole else tuple(before[start : start + 1]), tuple(prompt[start : start + 1]))
            if kind in kinds:
                kinds[kind] = replace(kinds[kind], count=kinds[kind].count + 1)
                continue
            end = 0 if whole else _common(before[start:][::-1], prompt[start:][::-1])
            ours, theirs = (token_views(side, [0] * len(side), tokenizer, special) for side in (before, prompt))
            stretches = (
                Stretch("same", ours[:start]),
                Stretch("trained", ours[start : len(ours) - end]),
                Stretch("served", theirs[start : len(theirs) - end]),
                Stretch("same", ours[len(ours) - end :]),
            )
            shown = tuple(stretch for stretch in stretches if stretch.tokens)
            kinds[kind] = PromptDifference(1, row.where, turn, start, shown)
    ordered = sorted(kinds.values(), key=lambda difference: -difference.count)[:_SHOWN_KINDS]
    return PromptParity(compared, of, turns, matching, refused, refusal, tuple(ordered))


def _pairs(row: ServedRow, *, whole: bool) -> list[tuple[list[int], int, list[int]]]:
    """The trained prompt, the number of the message that answers it and the served prompt, for each answer."""
    ids = row.ids.tolist()
    if whole:
        # A row that was cut off inside a prompt holds nothing of the answer.
        return [(ids[: len(prompt)], turn, prompt) for turn, prompt in row.prompts if prompt[: len(ids)] != ids]
    if not row.prompts:
        return []
    learned = np.flatnonzero(np.diff(row.mask.astype(np.int8), prepend=np.int8(0)) == 1).tolist()
    # Of the served prompts, the one that the tokens before a learned span are closest to.
    return [
        (before, *max(row.prompts, key=lambda served: (_common(before, served[1]), -abs(len(before) - len(served[1])))))
        for before in (ids[:start] for start in learned)
    ]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(left), len(right)))
