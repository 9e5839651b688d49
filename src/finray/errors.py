"""The errors that finray raises on purpose.

Every message says what happened, where (dotted config path, file and row, or directory) and how to repair it. The
command line prints the message without a traceback and exits with :attr:`FinrayError.exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FinrayError(Exception):
    """An error that the user can act on.

    Args:
        message: what happened, in one sentence.
        where: a dotted config path, ``file:row`` or a directory.
        repair: what to do about it.
        problems: what is wrong in detail, one line each.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, where: str | None = None, repair: str | None = None, problems: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.repair = repair
        self.problems = problems

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        repair = [f"  repair: {self.repair}"] if self.repair else []
        return "\n".join([head, *repair, *(f"  - {problem}" for problem in self.problems)])

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray sends errors between processes. The default protocol would lose the keyword-only arguments.
        return _rebuild, (type(self), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The error as plain JSON types; :func:`from_dict` reads it back."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "where": self.where,
            "repair": self.repair,
            "problems": list(self.problems),
        }


class ConfigError(FinrayError):
    """The configuration is not valid; ``problems`` lists every problem."""


class DataError(FinrayError):
    """A dataset cannot be read, converted or trained on."""


class ModelError(FinrayError):
    """A model, tokenizer or adapter cannot be loaded, changed or saved."""


class CheckpointError(FinrayError):
    """A checkpoint is damaged, missing, or could not be written."""


class ClusterError(FinrayError):
    """The cluster cannot be reached or cannot place the run."""


class TrainingError(FinrayError):
    """Training cannot continue: the loss is not finite, or workers keep failing."""


_KINDS: dict[str, type[FinrayError]] = {kind.__name__: kind for kind in FinrayError.__subclasses__()}


def from_dict(data: dict[str, Any]) -> FinrayError:
    """The error that :meth:`FinrayError.to_dict` wrote; a subclass defined elsewhere becomes a FinrayError."""
    return _rebuild(_KINDS.get(data["kind"], FinrayError), data)


def _rebuild(kind: type[FinrayError], data: dict[str, Any]) -> FinrayError:
    return kind(data["message"], where=data["where"], repair=data["repair"], problems=tuple(data["problems"]))


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`` (did you mean `x`?)`` with the known name that is most like ``name``; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean `{close[0]}`?)" if close else ""
