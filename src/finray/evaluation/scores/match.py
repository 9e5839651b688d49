"""Scores that are 0 or 1 per row: equal texts, equal numbers."""

from __future__ import annotations

import re
import string
from decimal import Decimal, InvalidOperation

from finray.evaluation.scores.base import Answered, SummedScore

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARKED = re.compile(r"####\s*(-?[$0-9.,]+)")
_BOXED = re.compile(r"\\boxed\s*{")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*{\s*(-?\d+)\s*}\s*{\s*(-?\d+)\s*}")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def normalized(text: str) -> str:
    """Text in lower case, without ASCII punctuation, English articles and repeated white space: SQuAD's normalization
    (Rajpurkar et al. 2016, evaluation script 1.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def number_in(text: str) -> Decimal | None:
    """The number that a text gives as its answer: after the first ``####`` (GSM8K), else in the last ``\\boxed{}``,
    else the last one.

    Thousands separators (commas) and a leading dollar sign are ignored. None if there is no number.
    """
    # Models also write the sign that mathematics uses.
    text = text.replace("\N{MINUS SIGN}", "-")
    if (marked := _MARKED.search(text)) is not None:
        return _decimal(marked[1])
    if (boxed := _last_boxed(text)) is not None:
        if (fraction := _FRACTION.search(boxed)) is not None and int(fraction[3]):
            return Decimal(f"{fraction[1]}1") * Decimal(fraction[2]) / Decimal(fraction[3])
        text = boxed
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None


def _last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}``, with balanced braces."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    for start in reversed(starts):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place]
    return None


class ExactMatch(SummedScore):
    """Share of answers that equal the reference, ignoring white space at the ends."""

    def row(self, row: Answered) -> float:
        """1 or 0."""
        return float(row.answer.strip() == row.reference.strip())


class NormalisedMatch(SummedScore):
    """Share of answers that equal the reference after :func:`normalized`."""

    def row(self, row: Answered) -> float:
        """1 or 0."""
        return float(normalized(row.answer) == normalized(row.reference))


class NumericAnswer(SummedScore):
    """Share of answers with the same number as the reference (:func:`number_in`); 5, 5.0 and $5.00 are equal."""

    def row(self, row: Answered) -> float:
        """1 or 0; 0 if the reference has no number."""
        wanted = number_in(row.reference)
        return float(wanted is not None and number_in(row.answer) == wanted)


class MultipleChoice(SummedScore):
    """Share of rows for which the right choice is the most likely continuation of the prompt."""

    needs = frozenset({"choices"})

    def row(self, row: Answered) -> float:
        """1 or 0; among equal ones the first wins, as in lm-eval (``acc``)."""
        likelihoods = row.log_likelihoods
        return float(max(range(len(likelihoods)), key=likelihoods.__getitem__) == row.right)


class MultipleChoiceByLength(MultipleChoice):
    """As :class:`MultipleChoice`, with likelihoods divided by the bytes of the choice (lm-eval's ``acc_bytes``)."""

    def row(self, row: Answered) -> float:
        """1 or 0."""
        each = [value / max(length, 1) for value, length in zip(row.log_likelihoods, row.choice_lengths, strict=True)]
        return float(max(range(len(each)), key=each.__getitem__) == row.right)
