"""The labels of labelled text: class balance, and equal texts with different labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from finray.data.dataset.labels import UNBALANCED, count_classes
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label, LabelSet
from finray.inspection.checks import Check
from finray.limits import cut

# A class with a smaller share of the rows is hardly learned.
_RARE = 0.01
_SHOWN_TEXTS = 5


@dataclass(frozen=True, slots=True)
class ClassBalance:
    """The labels of a split: rows of each class, in the order of ids; of numbers the least, mean and largest."""

    split: str
    problem: str
    rows: tuple[tuple[str, int], ...] = ()
    low: float | None = None
    mean: float | None = None
    high: float | None = None


def class_balance(labels: LabelSet, splits: Mapping[str, Sequence[Label]]) -> tuple[ClassBalance, ...]:
    """The labels of each split."""
    balances = []
    for name, split_labels in splits.items():
        if labels.problem == "regression":
            numbers = np.array(split_labels, dtype=np.float64)
            low, mean, high = float(numbers.min()), float(numbers.mean()), float(numbers.max())
            balances.append(ClassBalance(name, labels.problem, (), low, mean, high))
        else:
            counts = count_classes(split_labels)
            names = dict.fromkeys([*labels.names, *sorted(counts)])
            balances.append(ClassBalance(name, labels.problem, tuple((label, counts[label]) for label in names)))
    return tuple(balances)


def label_checks(
    splits: Mapping[str, PreparedSplit], labels: Mapping[str, Sequence[Label]], balance: Sequence[ClassBalance]
) -> tuple[Check, ...]:
    """Equal texts with different labels in all splits together, and the rarest class of the first.

    Args:
        splits: name to rows.
        labels: of these rows, by the same names.
        balance: of the same splits.
    """
    checks = [_contradictions(splits, labels)]
    if balance[0].rows:
        total = len(next(iter(splits.values())))
        name, fewest = min(balance[0].rows, key=lambda counted: counted[1])
        finding = f"the rarest class to train on, {cut(name, 60)}, has {fewest:,} of {total:,} rows"
        is_rare = fewest < total * _RARE or UNBALANCED * fewest <= max(rows for _, rows in balance[0].rows)
        if is_rare:
            finding += ", and will hardly be learned; classification.class_weights: balanced gives it more weight"
        checks.append(Check("Class balance", "warning" if is_rare else "ok", finding, fewest, total))
        if (everywhere := [name for name, rows in balance[0].rows if rows == total]) and total > 1:
            finding = f"all {total:,} rows to train on have {cut(', '.join(everywhere), 60)}: there is nothing to learn"
            checks.append(Check("A class that all rows have", "problem", finding, total, total))
    return tuple(checks)


def _contradictions(splits: Mapping[str, PreparedSplit], labels: Mapping[str, Sequence[Label]]) -> Check:
    name = "Equal texts, different labels"
    places = [(split, number) for split in splits for number in range(len(splits[split]))]
    each = [label for split in splits for label in labels[split]]
    digests = np.concatenate([rows.digests for rows in splits.values()])
    codes = {label: code for code, label in enumerate(dict.fromkeys(each))}
    # Every label of a text once: texts that are still there several times have several.
    pairs = np.unique(np.stack([digests, np.array([codes[label] for label in each])], axis=1), axis=0)
    unique, times = np.unique(pairs[:, 0], return_counts=True)
    texts = unique[times > 1]
    concerned = np.flatnonzero(np.isin(digests, texts))
    if not len(texts):
        return Check(name, "ok", f"no two of {len(each):,} rows have one text and different labels", 0, len(each))
    where: list[str] = []
    for digest in dict.fromkeys(digests[concerned].tolist()):
        if len(where) == _SHOWN_TEXTS:
            break
        first: dict[Label, int] = {}
        for at in concerned[digests[concerned] == digest].tolist():
            first.setdefault(each[at], at)
        named = ((splits[split].where(number), label) for label, at in first.items() for split, number in [places[at]])
        where.append(" = ".join(f"{place} ({label_text(label)})" for place, label in named))
    finding = f"{len(concerned):,} rows share {len(texts):,} texts that have different labels"
    return Check(name, "warning", finding, len(concerned), len(each), tuple(where))


def label_text(label: Label) -> str:
    """A label as it is shown."""
    if isinstance(label, float):
        return f"{label:g}"
    return cut(label if isinstance(label, str) else ", ".join(label) or "none", 60)
