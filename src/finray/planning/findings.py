"""Findings of a plan: problems, which prevent a run from starting, warnings, and skipped checks."""

from __future__ import annotations

from dataclasses import dataclass

from finray.errors import FinrayError


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """A problem or a warning."""

    message: str
    where: str | None = None  # a dotted config path, a file or a directory
    repair: str | None = None  # what to do about it, if that is known

    @classmethod
    def of(cls, error: FinrayError) -> PlanFinding:
        """The finding for an error; problems that it lists become part of the message."""
        return cls("; ".join([error.message, *error.problems]), error.where, error.repair)


def refuse(error: FinrayError) -> None:
    """Raise an error instead of collecting it."""
    raise error


@dataclass
class Findings:
    """Problems, warnings and skipped checks, in the order found; each once."""

    problems: tuple[PlanFinding, ...] = ()
    warnings: tuple[PlanFinding, ...] = ()
    unchecked: tuple[PlanFinding, ...] = ()

    def problem(self, *errors: FinrayError) -> None:
        """Record a problem that prevents the run from starting."""
        self.problems = _once(*self.problems, *map(PlanFinding.of, errors))

    def warn(self, message: str, where: str | None = None, repair: str | None = None) -> None:
        """Record a warning."""
        self.warnings = _once(*self.warnings, PlanFinding(message, where, repair))

    def skip(self, message: str, where: str | None = None) -> None:
        """Record a skipped check."""
        self.unchecked = _once(*self.unchecked, PlanFinding(message, where))


def _once(*findings: PlanFinding) -> tuple[PlanFinding, ...]:
    # Two checks may see the same, each with a list of its own in the repair.
    unique: dict[tuple[str, str | None], PlanFinding] = {}
    for finding in findings:
        unique.setdefault((finding.message, finding.where), finding)
    return tuple(unique.values())
