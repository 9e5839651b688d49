"""Labels of rows, and what a config says of them before a row is seen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from finray.config.resolved import LabelSet as LabelSet
from finray.config.resolved import Problem
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.errors import DataError
from finray.limits import cut, shown

# A class, several of them, or a number.
Label = str | tuple[str, ...] | float
_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class LabelRules:
    """How labels are read.

    Attributes:
        problem: what they must be; None where the labels themselves decide.
        names: of the classes, in the order of their ids; none where the training data give them.
    """

    problem: Problem | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> LabelRules | None:
        """From a config; None where its task learns from no labels."""
        if not task_spec(config.model.task).reads_labels:
            return None
        section = config.classification
        return cls(section.problem, tuple(section.labels or ()))


def label_of(value: Any, rules: LabelRules) -> Label:
    """A label as a row has it: a name, names, or a number.

    Raises:
        DataError: it is none that the rules allow; without a place.
    """
    problem = rules.problem
    if problem == "regression":
        return _number(value)
    if isinstance(value, list | tuple):
        if problem == "single_label":
            raise DataError(
                f"the label is a list, {shown(value)}, and classification.problem is single_label",
                repair="set classification.problem to multi_label, or give the row one label",
            )
        names = [_class(one, rules, within="a list") for one in value]
        if len(set(names)) < len(names):
            raise DataError(
                f"the label lists a class twice: {shown(value)}",
                repair="list the names or ids of the row's classes, such as [2, 5], not 0 or 1 for each class",
            )
        return tuple(names)
    if isinstance(value, float):
        if problem is not None or rules.names:
            raise DataError(
                f"the label is {shown(value)}, and classes are names or whole numbers",
                repair="write whole numbers or names; to learn the numbers themselves, set classification.problem to "
                "regression and leave classification.labels out",
            )
        return _number(value)
    name = _class(value, rules)
    return (name,) if problem == "multi_label" else name


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise DataError(
            f"the label is {shown(value)}, and classification.problem is regression: labels must be numbers",
            repair="mend the row, or set classification.problem to single_label",
        ) from None
    if not math.isfinite(number):
        raise DataError(f"the label is {number}, which is no number to learn", repair="mend or remove the row")
    return number


def _class(value: Any, rules: LabelRules, *, within: str = "") -> str:
    """The name of a class."""
    if not isinstance(value, str | int):
        raise DataError(
            f"the label {f'has {within} with' if within else 'is'} {shown(value)}; it must be a name or a whole number",
            repair="list the names or ids of the row's classes, such as [2, 5]" if within else None,
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
        f"the label {shown(value)} is none of the classes ({cut(', '.join(rules.names), 200)}), and no id of one",
        repair="mend the row, name the class in classification.labels, or set data.on_bad_row to drop",
    )


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes in the order of their ids: whole numbers by value, then the others."""
    return tuple(sorted(set(names), key=lambda one: (0, int(one), one) if _WHOLE.fullmatch(one) else (1, 0, one)))


_KINDS: dict[Problem, str] = {
    "single_label": "names or whole numbers",
    "multi_label": "lists",
    "regression": "numbers with decimals",
}


def mixed_labels(one: Problem, other: Problem, label: Label | None = None) -> DataError:
    """What to say of labels that speak for different problems."""
    numbers = "regression" in (one, other) and "multi_label" not in (one, other)
    return DataError(
        f"the labels are of different kinds: {_KINDS[one]} before, and {_KINDS[other]} here"
        + ("" if label is None else f" ({shown(label)})"),
        repair="set classification.problem to regression, to read all as numbers, or write the labels in one way"
        if numbers
        else "write the labels of all rows in one way",
    )


def kind_of(label: Label) -> Problem:
    """The problem that a label speaks for."""
    return "single_label" if isinstance(label, str) else "regression" if isinstance(label, float) else "multi_label"
