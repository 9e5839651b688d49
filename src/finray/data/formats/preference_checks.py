"""Checks of preferences before anything is trained: what no objective can learn from, or learns wrongly."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


def contradictions(better: Iterable[Hashable], worse: Iterable[Hashable]) -> list[tuple[int, int]]:
    """Pairs that say the opposite of an earlier one, by number: the same two answers (with their prompt), exchanged.
    Each is named once, after the first that it contradicts."""
    first: dict[tuple[Hashable, Hashable], int] = {}
    opposite: list[tuple[int, int]] = []
    for number, (chosen, rejected) in enumerate(zip(better, worse, strict=True)):
        if chosen != rejected and (rejected, chosen) in first:
            opposite.append((first[rejected, chosen], number))
        first.setdefault((chosen, rejected), number)
    return opposite


def balancing(
    desirable: int, undesirable: int, of_desirable: float, of_undesirable: float
) -> tuple[float, str, float, float] | None:
    """Of numbers of answers and their weights: the ratio of both sides as they are weighted, and the weight that mends
    it, with its range. None if it is from 1 to 4/3, as KTO's paper recommends, or if a side counts nothing."""
    if not min(desirable, undesirable, of_desirable, of_undesirable):
        return None
    ratio = desirable * of_desirable / (undesirable * of_undesirable)
    # A weight may be rounded.
    if 0.99 <= ratio <= 1.01 * 4 / 3:
        return None
    if ratio < 1:
        return ratio, "desirable_weight", of_desirable / ratio, of_desirable / ratio * 4 / 3
    return ratio, "undesirable_weight", of_undesirable * ratio * 3 / 4, of_undesirable * ratio


def only_class(wanted: Sequence[bool] | npt.NDArray[np.bool_]) -> bool | None:
    """Whether all answers are wanted (True), or none is (False), from which nothing can be told apart; None if there
    are both, or no answers."""
    values = {bool(value) for value in wanted}
    return values.pop() if len(values) == 1 else None
