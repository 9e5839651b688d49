"""Findings of a plan: problems, which prevent a run from starting, warnings, and skipped checks."""

from __future__ import annotations

from dataclasses import dataclass

from finray.errors import FinrayError


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a warning."""

    message: str
    where: str | None = None  # a dotted config path, a file or a directory
    repair: str | None = None  # what to do about it, if that is known

    @classmethod
    def of(cls, error: FinrayError) -> Finding:
        """The finding for an error; problems that it lists become part of the message."""
        return cls("; ".join([error.message, *error.problems]), error.where, error.repair)


def refuse(error: FinrayError) -> None:
    """Raise an error instead of collecting it."""
    raise error


@dataclass
class Findings:
    """Problems, warnings and skipped checks, in the order found; each once."""

    problems: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    unchecked: tuple[Finding, ...] = ()

    def problem(self, *errors: FinrayError) -> None:
        """Record a problem that prevents the run from starting."""
        self.problems = _once(*self.problems, *map(Finding.of, errors))

    def warn(self, message: str, where: str | None = None, repair: str | None = None) -> None:
        """Record a warning."""
        self.warnings = _once(*self.warnings, Finding(message, where, repair))

    def skip(self, message: str, where: str | None = None) -> None:
        """Record a skipped check."""
        self.unchecked = _once(*self.unchecked, Finding(message, where))


def _once(*findings: Finding) -> tuple[Finding, ...]:
    # Two checks may see the same, each with a list of its own in the repair.
    found: dict[tuple[str, str | None], Finding] = {}
    for one in findings:
        found.setdefault((one.message, one.where), one)
    return tuple(found.values())
