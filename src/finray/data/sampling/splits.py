"""Which rows are trained on: held-out rows by ratio, whole groups at a time, and several sources mixed.

Both are pure functions of the prepared rows and the seed, so another ratio or weight needs no new tokens. Rows are held
out before they are mixed, so that no copy of a held-out row is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finray.data.sampling.order import permutation
from finray.errors import DataError

# How often an epoch of a mix may hold the same row: more is a slip of the pen, and fills the memory.
MOST_REPEATS = 1000
FEW = 1_000_000
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Row numbers by split, each in source order."""

    train: IntArray
    eval: IntArray
    test: IntArray


def hold_out(groups: IntArray, *, eval_ratio: float, test_ratio: float, seed: int) -> Chosen:
    """Rows for training, evaluation and tests; rows of equal group stay together.

    Groups are taken in a seeded order until the share of rows is reached, first for evaluation, then for tests. Each
    split that is asked for gets a group at least, and so does training.

    Raises:
        DataError: there are fewer groups than splits.
    """
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    wanted = [round(len(groups) * ratio) if ratio else 0 for ratio in (eval_ratio, test_ratio)]
    needed = 1 + (eval_ratio > 0) + (test_ratio > 0)
    if len(sizes) < needed:
        what = "one row" if len(groups) == 1 else f"{len(sizes)} group{'s' if len(sizes) > 1 else ''} of rows"
        raise DataError(
            f"{what} cannot be split",
            where="data.eval_ratio" if eval_ratio else "data.test_ratio",
            repair="give more rows; rows that are the same, and rows of equal data.group_by, count as one",
        )
    order = permutation(len(sizes), "split", seed)
    side = np.zeros(len(sizes), dtype=np.int8)
    at = 0
    later = needed - 1
    for code, rows, ratio in ((1, wanted[0], eval_ratio), (2, wanted[1], test_ratio)):
        if not ratio:
            continue
        later -= 1
        taken = 0
        # The last groups are kept for those who come after.
        while at < len(sizes) - 1 - later and (taken == 0 or taken + int(sizes[order[at]]) <= rows):
            side[order[at]] = code
            taken += int(sizes[order[at]])
            at += 1
    of_row = side[number]
    return Chosen(np.flatnonzero(of_row == 0), np.flatnonzero(of_row == 1), np.flatnonzero(of_row == 2))


def sample(count: int, most: int | None, *, seed: int) -> IntArray:
    """Which of ``count`` rows are evaluated where at most ``most`` are, ascending.

    They are the first of a seeded permutation: the same wherever they are evaluated, and among those of a larger
    ``most``. The first rows of a file may be all of one kind.
    """
    return np.sort(permutation(count, "sample", seed)[:most])


def sizes_of_mix(available: Sequence[int], weights: Sequence[float | None], counts: Sequence[int | None]) -> list[int]:
    """Rows of each source in an epoch.

    A source with a count gives so many. Those with weights share, by weight, as many rows as they have together
    (largest remainder). Those with neither give what they have.
    """
    wanted = [rows if count is None else count for rows, count in zip(available, counts, strict=True)]
    weighed = [index for index, weight in enumerate(weights) if weight is not None]
    total = sum(available[index] for index in weighed)
    whole = sum(weights[index] or 0.0 for index in weighed)
    exact = {index: total * (weights[index] or 0.0) / whole for index in weighed}
    for index, share in exact.items():
        wanted[index] = int(share)
    short = total - sum(wanted[index] for index in weighed)
    for index in sorted(weighed, key=lambda index: (-(exact[index] - int(exact[index])), index))[:short]:
        wanted[index] += 1
    return wanted


def mixed(streams: IntArray, wanted: Sequence[int], *, seed: int) -> IntArray:
    """Row numbers of a mix: for each source its rows as often as they fit whole, and a seeded choice for the rest.

    Raises:
        DataError: a source has no rows left.
    """
    chosen = []
    for stream, count in enumerate(wanted):
        rows = np.flatnonzero(streams == stream)
        if count and not len(rows):
            raise DataError("the source has no rows left to mix", where=f"data.mix.{stream}")
        repeats, rest = divmod(count, max(len(rows), 1))
        if count > FEW and repeats > MOST_REPEATS:
            raise DataError(
                f"{count:,} rows an epoch are asked of a source that has {len(rows):,}",
                where=f"data.mix.{stream}.count",
                repair=f"ask for at most {MOST_REPEATS:,} times as many as it has",
            )
        some = np.sort(permutation(len(rows), "mix", seed, stream)[:rest])
        chosen.append(np.concatenate([np.tile(rows, repeats), rows[some]]))
    return np.concatenate(chosen).astype(np.int64)
