"""What a plan finds: problems, which keep a run from starting, warnings, and what it could not look at."""

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
        """The finding that an error is; problems that it lists become part of the message."""
        return cls("; ".join([error.message, *error.problems]), error.where, error.repair)


def refuse(error: FinrayError) -> None:
    """What to do about an error where nobody wants to go on."""
    raise error


@dataclass
class Findings:
    """Problems, warnings and what was not checked, as they are found; each once."""

    problems: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    unchecked: tuple[Finding, ...] = ()

    def problem(self, *errors: FinrayError) -> None:
        """Note what keeps the run from starting."""
        self.problems = _once(*self.problems, *map(Finding.of, errors))

    def warn(self, message: str, where: str | None = None, repair: str | None = None) -> None:
        """Note what is to be looked at."""
        self.warnings = _once(*self.warnings, Finding(message, where, repair))

    def skip(self, message: str, where: str | None = None) -> None:
        """Note what could not be looked at."""
        self.unchecked = _once(*self.unchecked, Finding(message, where))


def _once(*findings: Finding) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(findings))
