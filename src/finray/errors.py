"""The errors that finray raises on purpose.

Every message says what happened, where (dotted config path, file and row, or directory) and how to repair it. The
command line prints the message without a traceback and exits with :attr:`FinrayError.exit_code`.
"""

from __future__ import annotations

import difflib
import errno
import traceback
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
    # Something took too long, or too much memory; see finray.limits.
    overdue = False

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

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this name: in a notebook, too, what a user can repair is a message.
        return [f"{type(self).__name__}: {self}"]

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


class StorageError(FinrayError):
    """Storage behind a URL fails; another attempt may find it well."""


class ClusterError(FinrayError):
    """The cluster cannot be reached or cannot place the run."""


class HubError(FinrayError):
    """The Hub does not take what is pushed, or does not answer; ``where`` is a URL."""


class TrainingError(FinrayError):
    """Training cannot continue: the loss is not finite, or workers keep failing."""


_KINDS: dict[str, type[FinrayError]] = {kind.__name__: kind for kind in FinrayError.__subclasses__()}


def from_dict(data: dict[str, Any]) -> FinrayError:
    """The error that :meth:`FinrayError.to_dict` wrote; a subclass defined elsewhere becomes a FinrayError."""
    return _rebuild(_KINDS.get(data["kind"], FinrayError), data)


def _rebuild(kind: type[FinrayError], data: dict[str, Any]) -> FinrayError:
    return kind(data["message"], where=data["where"], repair=data["repair"], problems=tuple(data["problems"]))


# What bad input makes of libraries and of Python, by the class or one of its bases: what is said, and the repair.
_FOREIGN: dict[str, tuple[str, str]] = {
    "builtins.MemoryError": (
        "there is not enough memory for this",
        "look for a number that is too large in the config, or take a machine with more memory",
    ),
    "builtins.RecursionError": ("something is nested too deeply to be read", "look for it in what the command reads"),
    "builtins.UnicodeDecodeError": ("a file is not text in UTF-8", "save it in UTF-8"),
    "builtins.UnicodeEncodeError": (
        "there is text that is no Unicode (half of a surrogate pair)",
        "look for it in the command, the config or the data",
    ),
    "json.decoder.JSONDecodeError": ("a file is not JSON", "fetch or write it again"),
    "yaml.error.YAMLError": ("a file is not YAML", "mend or delete it"),
    "safetensors._safetensors_rust.SafetensorError": (
        "a safetensors file cannot be read or written",
        "fetch the model again",
    ),
    "_pickle.UnpicklingError": (
        "a file of weights is a pickle, which finray does not read",
        "convert the model to safetensors",
    ),
    "jinja2.exceptions.TemplateError": ("the chat template fails", "mend it, or set model.chat_template to another"),
    "pyarrow.lib.ArrowException": ("data cannot be read or written by Arrow", "look at the files, and write them anew"),
    "torch.OutOfMemoryError": ("the GPU has not enough memory", "`finray plan CONFIG` shows what needs it"),
    "builtins.ModuleNotFoundError": ("a package is missing", "install it"),
    "zipfile.BadZipFile": ("a file is damaged", "fetch or write it again"),
}
# Libraries that do little else than to read what they are given, each by its name in messages.
_READERS = frozenset(
    ("transformers", "tokenizers", "safetensors", "datasets", "huggingface_hub", "fsspec", "gguf", "pyarrow", "peft")
)


def explained(error: BaseException) -> FinrayError | None:
    """An error of any kind as one for the user; None where it can only be a defect in finray."""
    if isinstance(error, FinrayError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0][:300] if lines else type(error).__name__
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name, why = str(error.filename), (error.strerror or said)
        repair = {
            errno.ENOSPC: "make room there",
            errno.EDQUOT: "make room there",
            errno.ENAMETOOLONG: "take a shorter name",
            errno.EACCES: "give this user the right to it, or name another place",
            errno.EROFS: "name a place that can be written to",
            errno.ENOENT: "check the path and the working directory",
        }.get(error.errno, "look at that file or directory")
        return FinrayError(why[0].lower() + why[1:], where=name, repair=repair)
    if isinstance(error, OSError):
        return FinrayError(f"the system refuses: {said}", repair="look at the files and the network that are named")
    for kind in type(error).__mro__:
        if (known := _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            what, repair = known
            return FinrayError(what if said == type(error).__name__ else f"{what}: {said}", repair=repair)
    frames = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [name for name in frames if name == "finray" or name in _READERS]
    if packages and packages[-1] != "finray":
        return FinrayError(
            f"{packages[-1]} cannot go on: {type(error).__name__}: {said}",
            repair="the files that it was given may be damaged or of another kind; FINRAY_VERBOSE=1 shows where it was",
        )
    return None


def unmatched(names: Iterable[str], known: Iterable[str], *, where: str) -> ModelError:
    """The error of names of modules that match none; ``known`` are the endings of those that there are."""
    missing, endings = list(names), sorted(set(known) - {""})
    return ModelError(
        f"{'these match' if len(missing) > 1 else 'this matches'} no module: "
        + ", ".join(f"`{one}`{did_you_mean(one.rpartition('.')[2], endings, cutoff=0.5)}" for one in missing),
        where=where,
        repair=f"modules that can be named: {', '.join(endings)}",
    )


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`` (did you mean `x`?)`` with the known name that is most like ``name``; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean `{close[0]}`?)" if close else ""
