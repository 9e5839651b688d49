"""Scores of answers against references."""

from __future__ import annotations

from collections.abc import Sequence


def is_exact(answer: str, reference: str) -> bool:
    """Whether an answer is the reference, white space at the ends aside."""
    return answer.strip() == reference.strip()


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of exact answers, from 0 to 1."""
    hits = [is_exact(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    return sum(hits) / len(hits) if hits else 0.0
