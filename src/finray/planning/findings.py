"""What a plan finds: problems, which keep a run from starting, warnings, and what it could not look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from finray.errors import FinrayError


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a warning.

    Attributes:
        message: what it is.
        where: a dotted config path, a file or a directory, if there is one.
        repair: what to do about it, if that is known.
    """

    message: str
    where: str | None = None
    repair: str | None = None

    @classmethod
    def of(cls, error: FinrayError) -> Finding:
        """The finding that an error is; problems that it lists become part of the message."""
        return cls("; ".join([error.message, *error.problems]), error.where, error.repair)


@dataclass
class Findings:
    """Problems, warnings and what was not checked, as they are found."""

    _problems: list[Finding] = field(default_factory=list)
    _warnings: list[Finding] = field(default_factory=list)
    _unchecked: list[Finding] = field(default_factory=list)

    def problem(self, *errors: FinrayError) -> None:
        """Note what keeps the run from starting."""
        self._problems += [Finding.of(error) for error in errors]

    def warn(self, message: str, where: str | None = None, repair: str | None = None) -> None:
        """Note what is to be looked at."""
        self._warnings.append(Finding(message, where, repair))

    def skip(self, message: str, where: str | None = None) -> None:
        """Note what could not be looked at."""
        self._unchecked.append(Finding(message, where))

    @property
    def problems(self) -> tuple[Finding, ...]:
        """All problems, each once."""
        return tuple(dict.fromkeys(self._problems))

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """All warnings, each once."""
        return tuple(dict.fromkeys(self._warnings))

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """All that was not looked at, each once."""
        return tuple(dict.fromkeys(self._unchecked))
