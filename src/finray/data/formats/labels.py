"""Labels of rows, and the settings for them in a config."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from finray.config.objectives import spec_of
from finray.config.resolved import LabelSet as LabelSet
from finray.config.resolved import Problem
from finray.config.schema import Config
from finray.data.sources.readers import parse_json
from finray.errors import DataError
from finray.limits import cut, shown

# A class, several of them, or a number.
Label = str | tuple[str, ...] | float
_WHOLE = re.compile(r"-?[0-9]{1,18}")
NO_VECTOR = "list the names or ids of the row's classes, such as [2, 5], instead of a 0 or 1 for each class"


@dataclass(frozen=True, slots=True)
class LabelRules:
    """How labels are read."""

    problem: Problem | None = None  # their kind; None if the labels themselves decide
    names: tuple[str, ...] = ()  # of the classes, in the order of their ids; empty if the training data define them

    @classmethod
    def of(cls, config: Config) -> LabelRules | None:
        """From a config; None if its task has no labels."""
        if not spec_of(config).reads_labels:
            return None
        section = config.classification
        return cls(section.problem, tuple(section.labels or ()))


def label_of(value: Any, rules: LabelRules) -> Label:
    """The label of a row: a name, names, or a number.
    Raises DataError: the rules do not allow it; without a location."""
    problem = rules.problem
    if isinstance(value, Decimal):
        # Of a table.
        value = float(value)
    if isinstance(value, str) and value.lstrip().startswith("[") and value not in rules.names:
        value = _list_of(value, problem)
    if problem == "regression":
        return _number(value)
    if isinstance(value, list | tuple):
        if problem == "single_label":
            raise DataError(
                f"the label is a list, {shown(value)}, but classification.problem is single_label",
                repair="set classification.problem to multi_label, or give the row one label",
            )
        if any(isinstance(item, bool) for item in value):
            raise DataError(f"the label is a vector, {shown(value)}", repair=NO_VECTOR)
        names = [_class(item, rules, within="a list") for item in value]
        if len(set(names)) < len(names):
            raise DataError(
                f"the label lists a class twice: {shown(value)}",
                repair=NO_VECTOR,
            )
        return tuple(names)
    if isinstance(value, float):
        if problem is not None or rules.names:
            raise DataError(
                f"the label is {shown(value)}; classes must be names or whole numbers",
                repair="use whole numbers or names; to predict the number itself, set classification.problem to "
                "regression and leave classification.labels out",
            )
        return _number(value)
    name = _class(value, rules)
    return (name,) if problem == "multi_label" else name


def _list_of(text: str, problem: Problem | None) -> Any:
    """The list in a label that looks like one, in CSV for instance; of a single label it is a name."""
    if problem not in (None, "multi_label"):
        return text
    with suppress(ValueError, RecursionError):
        return parse_json(text)
    raise DataError(
        f"the label {shown(text)} looks like a list, but is not JSON",
        repair="write lists as JSON, in Python with json.dumps; if it is the name of a class, set "
        "classification.problem to single_label",
    )


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise DataError(
            f"the label is {shown(value)}, but with classification.problem regression labels must be numbers",
            repair="fix the row, or set classification.problem to single_label",
        ) from None
    if not math.isfinite(number):
        raise DataError(f"the label is {number}; it must be a finite number", repair="fix or remove the row")
    return number


def _class(value: Any, rules: LabelRules, *, within: str = "") -> str:
    """The name of a class."""
    if not isinstance(value, str | int):
        raise DataError(
            f"the label {f'has {within} with' if within else 'is'} {shown(value)}; it must be a name or a whole number",
            repair=NO_VECTOR if within else None,
        )
    name = str(value).lower() if isinstance(value, bool) else str(value)
    if not name.strip():
        raise DataError("the label is empty", repair="fill or remove the row, or set data.on_bad_row to drop")
    if not rules.names or name in rules.names:
        return name
    number = int(value) if isinstance(value, bool | int) else int(name) if _WHOLE.fullmatch(name) else -1
    if 0 <= number < len(rules.names) and not any(map(_WHOLE.fullmatch, rules.names)):
        return rules.names[number]
    raise DataError(
        f"the label {shown(value)} is neither a class ({cut(', '.join(rules.names), 200)}) nor the id of one",
        repair="fix the row, add the class to classification.labels, or set data.on_bad_row to drop",
    )


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in the order of their ids: integers by value, then the others."""
    unique = set(names)
    whole = set(filter(_WHOLE.fullmatch, unique))
    return (*sorted(whole, key=lambda name: (int(name), name)), *sorted(unique - whole))


_KINDS: dict[Problem, str] = {
    "single_label": "names or whole numbers",
    "multi_label": "lists",
    "regression": "numbers with decimals",
}


def mixed_labels(first: Problem, other: Problem, label: Label | None = None) -> DataError:
    """The error for labels of different problem types."""
    numbers = "regression" in (first, other) and "multi_label" not in (first, other)
    return DataError(
        f"the labels have different types: {_KINDS[first]} before, {_KINDS[other]} here"
        + ("" if label is None else f" ({shown(label)})"),
        repair="set classification.problem to regression to read all labels as numbers, or use one type for all labels"
        if numbers
        else "use one type for all labels",
    )


def kind_of(label: Label) -> Problem:
    """The problem type of a label."""
    return "single_label" if isinstance(label, str) else "regression" if isinstance(label, float) else "multi_label"
