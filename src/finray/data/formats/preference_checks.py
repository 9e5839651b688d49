"""Checks of preferences before anything is trained: what no objective can learn from, or learns wrongly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.data.formats.examples import Chat, Completion, Preference, Unpaired

# From this share of pairs on, the longer (or the shorter) answer is chosen so often that length alone is learned.
_TELLING = 0.65


@dataclass(frozen=True, slots=True)
class LengthBias:
    """How often the longer of two answers is the better one."""

    share: float  # of the pairs whose answers differ in length
    low: float  # its interval of 95 % (Wilson's)
    high: float
    pairs: int  # that differ in length

    @property
    def is_telling(self) -> bool:
        """Whether length alone predicts the preference, in either direction."""
        return self.pairs > 0 and (self.low > _TELLING or self.high < 1 - _TELLING)


def length_bias(chosen: npt.ArrayLike, rejected: npt.ArrayLike) -> LengthBias:
    """From the lengths of the better and of the worse answers, in tokens or characters."""
    from scipy.stats import binomtest

    longer = np.asarray(chosen) - np.asarray(rejected)
    pairs, count = int((longer != 0).sum()), int((longer > 0).sum())
    if not pairs:
        return LengthBias(0.5, 0.0, 1.0, 0)
    interval = binomtest(count, pairs).proportion_ci(method="wilson")
    return LengthBias(count / pairs, float(interval.low), float(interval.high), pairs)


def contradictions(examples: Iterable[Preference | Unpaired]) -> list[tuple[int, int]]:
    """Examples that say the opposite of an earlier one, by number: the same pair swapped, or the same answer wanted and
    not wanted. Each is named once, after the first that it contradicts."""
    first: dict[tuple[bytes, ...], int] = {}
    opposite: list[tuple[int, int]] = []
    for number, example in enumerate(examples):
        if isinstance(example, Preference):
            better, worse = _digest(example.chosen), _digest(example.rejected)
            key, other = (better, worse), (worse, better)
        else:
            answer = _digest(example.answer)
            key, other = (answer, b"1" * example.is_wanted), (answer, b"1" * (not example.is_wanted))
        if key != other and other in first:
            opposite.append((first[other], number))
        first.setdefault(key, number)
    return opposite


def only_class(wanted: Sequence[bool] | npt.NDArray[np.bool_]) -> bool | None:
    """Whether all answers are wanted (True), or none is (False), from which nothing can be told apart; None if there
    are both, or no answers."""
    values = {bool(value) for value in wanted}
    return values.pop() if len(values) == 1 else None


def _digest(answer: Chat | Completion) -> bytes:
    """Of an answer with its prompt."""
    content: Any = (
        (answer.prompt, answer.completion)
        if isinstance(answer, Completion)
        else ([(item.plain(), item.train) for item in answer.messages], answer.tools, dict(answer.arguments))
    )
    return hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=16).digest()
