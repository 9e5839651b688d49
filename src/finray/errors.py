"""The errors that finray raises on purpose.

Every message says what happened, where (dotted config path, file and row, or directory) and how to repair it. The
command line prints the message without a traceback and exits with :attr:`FinrayError.exit_code`.
"""

from __future__ import annotations

import difflib
import errno
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Masks secrets in what is said: `finray.config.redact`, which puts itself here because it is above this module.
MASKS: list[Callable[[str], str]] = []
# Names of the config's sections, which `finray.config.section` puts here.
SECTIONS: set[str] = set()


def masked(text: str) -> str:
    """A text without secrets."""
    for mask in MASKS:
        text = mask(text)
    return text


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
        return masked("\n".join([head, *repair, *(f"  - {problem}" for problem in self.problems)]))

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


class DataUnavailable(DataError):
    """Storage that holds data does not answer; another attempt may succeed."""


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


_KINDS: dict[str, type[FinrayError]] = {
    kind.__name__: kind for kind in (*FinrayError.__subclasses__(), DataUnavailable)
}


def from_dict(data: dict[str, Any]) -> FinrayError:
    """The error that :meth:`FinrayError.to_dict` wrote; a subclass defined elsewhere becomes a FinrayError."""
    return _rebuild(_KINDS.get(data["kind"], FinrayError), data)


def _rebuild(kind: type[FinrayError], data: dict[str, Any]) -> FinrayError:
    return kind(data["message"], where=data["where"], repair=data["repair"], problems=tuple(data["problems"]))


# Errors that bad input causes in libraries and in Python, by class or base class: message and repair.
_FOREIGN: dict[str, tuple[str, str]] = {
    "builtins.MemoryError": (
        "out of memory",
        "look for a number that is too large in the config, or use a machine with more memory",
    ),
    "builtins.RecursionError": ("a file is nested too deeply", "look for it in the files that the command reads"),
    "builtins.UnicodeDecodeError": ("a file is not text in UTF-8", "save it in UTF-8"),
    "builtins.UnicodeEncodeError": (
        "a text is not valid Unicode (half of a surrogate pair)",
        "look for it in the command, the config or the data",
    ),
    "json.decoder.JSONDecodeError": ("a file is not JSON", "fetch or write it again"),
    "yaml.error.YAMLError": ("a file is not YAML", "fix or delete it"),
    "safetensors._safetensors_rust.SafetensorError": (
        "a safetensors file cannot be read or written",
        "download the model again",
    ),
    "_pickle.UnpicklingError": (
        "a file of weights is a pickle, which finray does not read",
        "convert the model to safetensors",
    ),
    "jinja2.exceptions.TemplateError": ("the chat template fails", "fix it, or set model.chat_template to another"),
    "pyarrow.lib.ArrowException": ("data cannot be read or written by Arrow", "check the files, and write them again"),
    "torch.OutOfMemoryError": ("the GPU is out of memory", "`finray plan CONFIG` shows what needs it"),
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
    # Masked before it is cut: of half a secret nobody knows the form.
    detail = first_sentence(masked(str(error)))[:300] or type(error).__name__
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name, why = str(error.filename), (error.strerror or detail)
        repair = {
            errno.ENOSPC: "free some disk space",
            errno.EDQUOT: "free some disk space",
            errno.ENAMETOOLONG: "take a shorter name",
            errno.EACCES: "give this user permission, or choose another path",
            errno.EROFS: "choose a writable path",
            errno.ENOENT: "check the path and the working directory",
        }.get(error.errno, "check that file or directory")
        return FinrayError(why[0].lower() + why[1:], where=name, repair=repair)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FinrayError((error.strerror or detail).lower(), repair="free some disk space")
    if isinstance(error, BrokenPipeError):
        return FinrayError("what this command writes to has ended", repair="keep it open, or write to a file")
    if isinstance(error, OSError):
        return FinrayError(
            f"the operating system refused: {detail}", repair="check the file or network address named here"
        )
    if isinstance(error, RuntimeError) and detail.startswith("Could not determine home directory"):
        # Of `Path.expanduser`, for `~name/x`.
        return FinrayError("a path begins with `~` and a name that is no user's here", repair="write the whole path")
    if type(error).__name__ == "ValidationError" and getattr(error, "title", None) in SECTIONS:
        # What a command was given, in a section that it made.
        first = error.errors()[0]  # type: ignore[attr-defined]
        place, reason = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
        return FinrayError(reason[0].lower() + reason[1:], where=place or None, repair="correct this value")
    for kind in type(error).__mro__:
        if (explanation := _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            what, repair = explanation
            return FinrayError(what if detail == type(error).__name__ else f"{what}: {detail}", repair=repair)
    frames = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [name for name in frames if name == "finray" or name in _READERS]
    if packages and packages[-1] != "finray":
        # Damaged files have errors of their own, above.
        return FinrayError(
            f"{packages[-1]} failed: {type(error).__name__}: {detail}",
            where=next((note for note in getattr(error, "__notes__", []) if note.startswith("model.name=")), None),
            repair=f"if the message names a setting, change it; else {packages[-1]} {version(packages[-1])} may not "
            "support this input: FINRAY_VERBOSE=1 shows where it failed",
        )
    return None


def first_sentence(text: str) -> str:
    """The first line of a library's message, with the next where it only announces that."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


@contextmanager
def about_model(name: str) -> Iterator[None]:
    """An error of a library that passes is about this model, and says so."""
    try:
        yield
    except Exception as error:
        error.add_note(f"model.name={name}")
        raise


def of_storage(error: BaseException) -> FinrayError | None:
    """An error of a disk that is full or that refuses this user, for which a retry is useless; None for any other."""
    refused = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return explained(error) if refused else None


def require_package(what: str, package: str, *, extra: str, where: str | None = None) -> None:
    """Check that a package is installed.

    Args:
        what: needs it.
        package: its name, and that of its module.
        extra: of finray's, which installs it.
        where: what asks for it.

    Raises:
        ModelError: it is not.
    """
    if find_spec(package) is None:
        raise ModelError(
            f"{what} needs the package {package}, which is not installed",
            where=where,
            repair=f"pip install 'finray[{extra}]'",
        )


def unmatched(names: Iterable[str], known: Iterable[str], *, where: str) -> ModelError:
    """The error of names of modules that match none; ``known`` are the endings of those that there are."""
    # Layers of a list are numbered.
    missing, endings = list(names), sorted({name for name in known if name and not name.isdigit()})
    return ModelError(
        f"{'these match' if len(missing) > 1 else 'this matches'} no module: "
        + ", ".join(f"`{name}`{did_you_mean(name.rpartition('.')[2], endings, cutoff=0.5)}" for name in missing),
        where=where,
        repair=f"available modules: {', '.join(endings)}",
    )


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`` (did you mean `x`?)`` with the known name that is most like ``name``; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean `{close[0]}`?)" if close else ""


def did_you_mean_path(name: str | Path, *patterns: str) -> str:
    """As :func:`did_you_mean`, with what lies beside a path that does not exist, written as the path is; ``patterns``
    are of the names that may be meant, and none means all."""
    path = Path(name)

    def likeness(other: Path) -> float:
        # An ending that both have makes no names alike.
        first, second = (path.stem, other.stem) if path.suffix == other.suffix else (path.name, other.name)
        return difflib.SequenceMatcher(None, first, second).ratio()

    beside: list[Path] = []
    with suppress(OSError, RuntimeError, ValueError):
        beside += [sibling for pattern in patterns or ("*",) for sibling in path.parent.expanduser().glob(pattern)]
    best = max(beside, key=likeness, default=None)
    return f" (did you mean `{path.parent / best.name}`?)" if best is not None and likeness(best) >= 0.6 else ""
