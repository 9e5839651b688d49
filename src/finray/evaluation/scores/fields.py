"""JSON answers: whether they are valid, and how many of their fields are correct."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from finray.evaluation.scores.base import Answered, FloatArray, SummedScore


def parsed(text: str) -> Any:
    """Parse a text as JSON (RFC 8259, so without NaN). Raises ValueError: it is not JSON."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every field of a JSON value: its path and its content as JSON; an empty object or list is a field itself."""
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        # 1 and 1.0 are the same number in JSON; true is not 1.
        is_whole = isinstance(value, float) and value.is_integer()
        yield path, json.dumps(int(value) if is_whole else value)


class JSONValid(SummedScore):
    """Share of answers that are JSON, surrounded by nothing but white space."""

    def row(self, row: Answered) -> float:
        """1 or 0."""
        try:
            parsed(row.answer)
        except ValueError:
            return 0.0
        return 1.0


class JSONFields(SummedScore):
    """F1 of fields over all rows (micro): a field is right if the reference has the same value at the same path.

    An answer that is not JSON has no fields; rows whose reference is not JSON do not count.
    """

    def statistics(self, rows: Sequence[Answered]) -> FloatArray:
        """Right fields, fields of the answer, and fields of the reference."""
        counts = np.zeros((len(rows), 3))
        for number, row in enumerate(rows):
            wanted, given = (self._fields(text) for text in (row.reference, row.answer))
            if wanted:
                counts[number] = len(wanted & given), len(given), len(wanted)
        return counts

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """``2 * right / (given + wanted)``."""
        right, given, wanted = sums_K
        return float(2 * right / (given + wanted)) if given + wanted else 0.0

    @staticmethod
    def _fields(text: str) -> set[tuple[tuple[str | int, ...], str]]:
        try:
            return set(leaves(parsed(text)))
        except (ValueError, RecursionError):
            return set()
