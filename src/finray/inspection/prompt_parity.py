"""Proof that what is trained continues exactly the prompt that serving will render.

A server gets the messages before an answer, renders them with ``add_generation_prompt=True`` and tokenises that, alone.
The row that was trained on must begin with the very same token ids, up to where learning starts. Where it does not,
the model is asked something else than it has learned to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from finray.errors import DataError
from finray.inspection.token_views import TokenView, token_views

# Longer stretches are shown as one replacement, since aligning takes time that grows with the square.
_ALIGNED = 600
_SHOWN_KINDS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a server is given before an answer: ``turn`` is the number of the answer's message, from 0."""

    turn: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are in both prompts, or only in the one that was trained on, or only in the served one."""

    kind: Literal["same", "trained", "served"]
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True, slots=True)
class ServingDifference:
    """A way in which prompts differ, with one example.

    Attributes:
        count: turns that differ in this way.
        where: source of the example.
        turn: its message, from 0.
        position: number of the first token that differs, from 0.
        pieces: both prompts, aligned.
        trained, served: the two prompts as text.
    """

    count: int
    where: str
    turn: int
    position: int
    pieces: tuple[Piece, ...]
    trained: str
    served: str


@dataclass(frozen=True, slots=True)
class ServingCheck:
    """The outcome.

    Attributes:
        rows, of: rows that were compared, and rows there are.
        turns: learned answers that were compared.
        matching: those whose prompt is the served one, token by token.
        without_prompt: rows that have no prompt (plain text).
        refused: answers whose prompt the chat template refuses to render, and its first words about that.
        refusal: what the template said.
        differences: kinds of differences, the most frequent first.
    """

    rows: int = 0
    of: int = 0
    turns: int = 0
    matching: int = 0
    without_prompt: int = 0
    refused: int = 0
    refusal: str = ""
    differences: tuple[ServingDifference, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every compared answer continues the served prompt."""
        return self.matching == self.turns and not self.refused


@dataclass(frozen=True, slots=True)
class Served:
    """A row and what a server would be given for it.

    Attributes:
        where: source of the row.
        ids, mask: the row.
        prompts: the served prompt of every answer in it; empty where there is no prompt.
        refusal: why the template refused, empty if it did not.
    """

    where: str
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    prompts: tuple[Prompt, ...]
    refusal: str = ""


def served_prompts(
    turns: Iterable[int], render: Callable[[int], str], tokenizer: Any
) -> tuple[tuple[Prompt, ...], str]:
    """Tokenise the prompt of each turn as a server does; the second value is why the template refused, if it did.

    Args:
        turns: numbers of the answers' messages.
        render: from such a number to the rendered messages before it, with the generation prompt.
        tokenizer: the Transformers tokenizer.
    """
    prompts, refusal = [], ""
    for turn in turns:
        try:
            text = render(turn)
        except DataError as error:
            refusal = refusal or error.message
            continue
        prompts.append(Prompt(turn, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return tuple(prompts), refusal


def check_serving(
    rows: Iterable[Served], *, of: int, whole: bool, tokenizer: Any, special: frozenset[int]
) -> ServingCheck:
    """Compare rows with what a server is given.

    Args:
        rows: the rows to compare.
        of: rows there are.
        whole: whether all tokens are learned, prompts too.
        tokenizer: the Transformers tokenizer, to show tokens.
        special: its special tokens.
    """
    compared = turns = without = refused = 0
    refusal = ""
    kinds: dict[tuple[tuple[int, ...], ...], ServingDifference] = {}
    differing = 0
    for row in rows:
        compared += 1
        if not row.prompts:
            without += not row.refusal
            refused += bool(row.refusal)
            refusal = refusal or row.refusal
            continue
        found = _whole_row(row) if whole else _learned_spans(row)
        turns += len(found)
        for trained, prompt in found:
            if trained == prompt.ids:
                continue
            if row.refusal:
                # It may be the answer whose prompt cannot be rendered; nothing can be said of it.
                turns, refused, refusal = turns - 1, refused + 1, refusal or row.refusal
                continue
            differing += 1
            changes = _changes(trained, prompt.ids, align=not whole)
            kind = _kind(changes, trained, prompt.ids, whole=whole)
            known = kinds.get(kind)
            if known is None:
                kinds[kind] = _difference(row.where, prompt, trained, changes, tokenizer, special)
            else:
                kinds[kind] = replace(known, count=known.count + 1)
    ordered = sorted(kinds.values(), key=lambda difference: -difference.count)
    return ServingCheck(
        rows=compared,
        of=of,
        turns=turns,
        matching=turns - differing,
        without_prompt=without,
        refused=refused,
        refusal=refusal,
        differences=tuple(ordered[:_SHOWN_KINDS]),
    )


def _learned_spans(row: Served) -> list[tuple[tuple[int, ...], Prompt]]:
    """For each learned span, the tokens before it and the served prompt that they should be.

    Which answer a span belongs to is not asked: if the tokens before it are the prompt of any answer, the span
    continues that prompt.
    """
    mask = row.mask.astype(np.int8)
    starts = np.flatnonzero(np.diff(mask, prepend=np.int8(0)) == 1)
    found = []
    for start in starts.tolist():
        before = tuple(row.ids[:start].tolist())
        equal = [prompt for prompt in row.prompts if prompt.ids == before]
        best = equal[0] if equal else max(row.prompts, key=lambda prompt: _likeness(before, prompt.ids))
        found.append((before, best))
    return found


def _whole_row(row: Served) -> list[tuple[tuple[int, ...], Prompt]]:
    """Where everything is learned, the row must begin with every served prompt, unless it was cut off in it."""
    ids = tuple(row.ids.tolist())
    return [(ids[: len(prompt.ids)], prompt) for prompt in row.prompts if prompt.ids[: len(ids)] != ids]


def _likeness(before: Sequence[int], served: Sequence[int]) -> tuple[int, int]:
    return _common(before, served), -abs(len(before) - len(served))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


Change = tuple[int, int, int, int]


def _changes(trained: Sequence[int], served: Sequence[int], *, align: bool) -> list[Change]:
    """What differs, in order: from, to in the trained prompt, from, to in the served one.

    Without ``align`` all that follows the first difference differs: where the trained prompt ends is not known then.
    """
    start = _common(trained, served)
    if not align:
        return [(start, len(trained), start, len(served))]
    end = min(_common(trained[::-1], served[::-1]), min(len(trained), len(served)) - start)
    left, right = trained[start : len(trained) - end], served[start : len(served) - end]
    if max(len(left), len(right)) > _ALIGNED:
        return [(start, start + len(left), start, start + len(right))]
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    return [
        (start + one, start + two, start + three, start + four)
        for tag, one, two, three, four in matcher.get_opcodes()
        if tag != "equal"
    ]


def _kind(
    changes: list[Change], trained: Sequence[int], served: Sequence[int], *, whole: bool
) -> tuple[tuple[int, ...], ...]:
    """What tells kinds of differences apart: the tokens that change first (not those of an answer)."""
    one, two, three, four = changes[0]
    return (() if whole else tuple(trained[one:two])), tuple(served[three:four])


def _difference(
    where: str,
    prompt: Prompt,
    trained: tuple[int, ...],
    changes: list[Change],
    tokenizer: Any,
    special: frozenset[int],
) -> ServingDifference:
    ours = token_views(trained, [0] * len(trained), tokenizer, special)
    theirs = token_views(prompt.ids, [0] * len(prompt.ids), tokenizer, special)
    pieces: list[Piece] = []
    at = 0
    for one, two, three, four in changes:
        pieces.append(Piece("same", ours[at:one]))
        pieces.append(Piece("trained", ours[one:two]))
        pieces.append(Piece("served", theirs[three:four]))
        at = two
    pieces.append(Piece("same", ours[at:]))
    return ServingDifference(
        count=1,
        where=where,
        turn=prompt.turn,
        position=changes[0][2],
        pieces=tuple(piece for piece in pieces if piece.tokens),
        trained="".join(token.text for token in ours),
        served="".join(token.text for token in theirs),
    )
