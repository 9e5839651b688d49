"""Chooses the rows to train on: held-out rows by ratio, in whole groups, and mixtures of several sources.

Both are pure functions of the prepared rows and the seed, so another ratio or weight needs no new tokenization. Rows
are held out before mixing, so that no copy of a held-out row is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finray.data.sampling.order import permutation
from finray.errors import DataError

# Maximum repetitions of a row in an epoch of a mix: more is a typing error, and would exhaust memory.
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
    """Rows for training, evaluation and tests; rows of the same group stay together.

    Groups are taken in a seeded order until the share of rows is reached, first for evaluation, then for tests. Each
    requested split gets at least one group, and so does training. A ratio of 2 or more is a number of rows. Raises
    DataError: there are fewer groups than splits, or not more rows than are held out.
    """
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    wanted = [round(ratio if ratio > 1 else len(groups) * ratio) for ratio in (eval_ratio, test_ratio)]
    needed = 1 + (eval_ratio > 0) + (test_ratio > 0)
    if len(sizes) < needed:
        what = "one row" if len(groups) == 1 else f"{len(sizes)} group{'s' if len(sizes) > 1 else ''} of rows"
        raise DataError(
            f"{what} cannot be split",
            where="data.eval_ratio" if eval_ratio else "data.test_ratio",
            repair="add rows; equal rows count as one, and so do rows with the same data.group_by value",
        )
    if sum(wanted) >= len(groups) and max(eval_ratio, test_ratio) > 1:
        raise DataError(
            f"{sum(wanted):,} rows held out leave none of {len(groups):,} for training",
            where="data.eval_ratio" if eval_ratio > 1 else "data.test_ratio",
            repair="hold out fewer rows, or a share of them, such as 0.1",
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
        # Keep the last groups for the following splits.
        while at < len(sizes) - 1 - later and (taken == 0 or taken + int(sizes[order[at]]) <= rows):
            side[order[at]] = code
            taken += int(sizes[order[at]])
            at += 1
    of_row = side[number]
    return Chosen(np.flatnonzero(of_row == 0), np.flatnonzero(of_row == 1), np.flatnonzero(of_row == 2))


def sample(count: int, most: int | None, *, seed: int) -> IntArray:
    """Indices of the rows to evaluate, at most ``most`` of ``count``, ascending.

    They are the first of a seeded permutation: the same everywhere, and a subset of those for a larger ``most``. The
    first rows of a file may be all of one kind.
    """
    return np.sort(permutation(count, "sample", seed)[:most])


def sizes_of_mix(available: Sequence[int], weights: Sequence[float | None], counts: Sequence[int | None]) -> list[int]:
    """Number of rows of each source in an epoch.

    A source with a count gives that many. Those with weights share, by weight, the total number of their rows (largest
    remainder). Those with neither give all their rows.
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
    """Row numbers of a mix: each source's rows repeated as often as they fit, and a seeded sample for the rest.
    Raises DataError: a source has no rows left."""
    chosen = []
    for stream, count in enumerate(wanted):
        rows = np.flatnonzero(streams == stream)
        if count and not len(rows):
            raise DataError("the source has no rows left to mix", where=f"data.mix.{stream}")
        repeats, rest = divmod(count, max(len(rows), 1))
        if count > FEW and repeats > MOST_REPEATS:
            raise DataError(
                f"{count:,} rows per epoch were requested from a source with {len(rows):,}",
                where=f"data.mix.{stream}.count",
                repair=f"request at most {MOST_REPEATS:,} times its number of rows",
            )
        some = np.sort(permutation(len(rows), "mix", seed, stream)[:rest])
        chosen.append(np.concatenate([np.tile(rows, repeats), rows[some]]))
    return np.concatenate(chosen).astype(np.int64)
