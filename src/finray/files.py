"""The one place that opens what finray reads back: permission, encoding, shape, digest, seal.

Each kind of file defines its error class and repair once; see :class:`FileKind`. A file that cannot
be used is then one message that names it, wherever it is read, and never a traceback.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from finray.errors import FinrayError

T = TypeVar("T")
SEAL = "seal"
# What Python and Pydantic raise for a file that is not what it should be.
_KNOWN = (OSError, ValueError, EOFError, RecursionError)
# A new directory may not be locked yet.
_NEW_S = 60.0
# Bytes that wait for room on a disk, before what comes next is lost.
HELD_BYTES = 64 * 2**20
# Made when the first file is read, because that takes milliseconds.
_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True, slots=True)
class FileKind:
    """How files of one kind are read.

    Attributes:
        error: what is raised where one cannot be used; ``where`` is the file.
        repair: what the user can do then.
        limit: bytes that such a file has at most.
    """

    error: type[FinrayError]
    repair: str | None = None
    limit: int = 256 * 2**20

    @contextmanager
    def reading(self, where: Path | str, *, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Whatever goes wrong with a file inside the block becomes one error that names it.

        Args:
            where: the file.
            also: errors of a library that reads it, beside those of Python.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, FinrayError) or not isinstance(error, (*_KNOWN, *also)):
                raise
            raise self.refused(_described(error), where) from None

    def refused(self, message: str, where: Path | str) -> FinrayError:
        """The error of a file."""
        return self.error(message, where=str(where), repair=self.repair)

    def read(self, path: Path) -> bytes:
        """The content of a regular file."""
        with self.reading(path):
            if (size := self._size(path)) > self.limit:
                raise self.refused(f"has {size:,} bytes; at most {self.limit:,} are read", path)
            with path.open("rb") as stream:
                return stream.read()

    def text(self, path: Path) -> str:
        """The content of a text file."""
        with self.reading(path):
            return self.read(path).decode("utf-8")

    def json(self, path: Path, shape: type[T]) -> T:
        """What a JSON file holds: a dataclass, a TypedDict, or plain types. Fields that the shape lacks are ignored."""
        return self.parsed(self.read(path), shape, path)

    def parsed(self, content: bytes, shape: type[T], where: Path | str) -> T:
        """As :meth:`json`, of content that was read already."""
        with self.reading(where):
            return _reader(shape).validate_json(content, strict=True)  # type: ignore[no-any-return]

    def unsealed(self, content: bytes, shape: type[T], where: Path | str) -> T:
        """As :meth:`parsed`, of an object that was made by :func:`sealed` and has not changed since."""
        with self.reading(where):
            found = json.loads(content)
        if not isinstance(found, dict) or found.pop(SEAL, None) != seal_of(found):
            raise self.refused("was changed after it was written", where)
        return self.parsed(content, shape, where)

    def verify(self, path: Path, *, size: int, sha256: str | None) -> None:
        """See that a file has the bytes that were written; without a digest, as many."""
        with self.reading(path):
            if (found := self._size(path)) != size:
                raise self.refused(f"has {found} bytes instead of {size}", path)
            if sha256 is not None and digest_of(path) != sha256:
                raise self.refused("has changed since it was written", path)

    def _size(self, path: Path) -> int:
        """Bytes of a regular file."""
        known = path.stat()
        if not stat.S_ISREG(known.st_mode):
            raise self.refused("is not a file", path)
        return known.st_size

    def inside(self, folder: Path, name: str, *, where: Path | str) -> Path:
        """The path of something that a file names, which must lie in its own directory."""
        if not name or "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise self.refused(f"names a file outside its directory: {name!r}", where)
        return folder / name


def typed(content: Any, shape: type[T]) -> T:
    """JSON types as a dataclass or the like.

    Raises:
        ValueError: they are of another shape.
    """
    return _reader(shape).validate_json(json.dumps(content), strict=True)  # type: ignore[no-any-return]


def require_writable(folder: Path) -> None:
    """See that files can be written into a directory, before work is done whose result goes there.

    Raises:
        FinrayError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FinrayError(
            f"cannot write there: {(error.strerror or str(error)).lower()}",
            where=str(folder),
            repair="create the directory, or choose another one",
        ) from None


def require_writable_file(path: Path) -> None:
    """See that a file can be made, or written again if it is there, before work is done whose result goes into it.

    Raises:
        FinrayError: it cannot.
    """
    require_writable(path.absolute().parent)
    # Not a pipe, which would wait for its reader.
    if path.is_file():
        try:
            path.open("ab").close()
        except OSError as error:
            raise FinrayError(
                f"the file cannot be written: {(error.strerror or str(error)).lower()}",
                where=str(path),
                repair="make it writable, or choose another file",
            ) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see either the old or the new content."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """As :func:`replace_text`."""
    replace_all({path: content})


def replace_all(contents: dict[Path, bytes]) -> None:
    """As :func:`replace_text`, for files that belong together: none is replaced before all are written.

    Raises:
        OSError: with the name of the file.
    """
    with ExitStack() as stack:
        # The first is replaced first.
        for path, stream in [(path, stack.enter_context(replacing(path))) for path in reversed(contents)]:
            with _naming(path):
                stream.write(contents[path])
                stream.flush()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of another one at the end of the block; after an error the other one stays."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with _naming(path):
            with scratch.open("xb") as stream:
                yield stream
            os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A full disk is an error without the name of a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class Appending:
    """Appends to a file. What cannot be written is held, and written in order before whatever comes next.

    Of a line that a full disk cut off, the rest is written later; readers leave out what has no line end.

    Args:
        path: a regular file, or none yet; it is opened with the first write. No link is followed.
        limit: bytes to hold at most.

    Attributes:
        waiting: pieces of content that are held, at least in part.
        lost: pieces that were more than the limit.
    """

    def __init__(self, path: Path, *, limit: int = HELD_BYTES) -> None:
        self.waiting = self.lost = 0
        self._path, self._limit = path, limit
        self._held = bytearray()
        self._file: int | None = None

    def append(self, content: bytes) -> None:
        """Pass content to the operating system.

        Raises:
            OSError: it cannot be written now; it is held, or lost.
        """
        if len(self._held) + len(content) > self._limit:
            self.lost += 1
        else:
            self._held += content
            self.waiting += 1
        self.write()

    def write(self, *, durably: bool = False) -> None:
        """Write what is held; ``durably`` waits for the disk.

        Raises:
            OSError: something is still held, or may not be on disk.
        """
        with _naming(self._path):
            if self._file is None:
                # A pipe would wait for its reader.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o666)
                if not stat.S_ISREG(os.fstat(self._file).st_mode):
                    raise OSError(errno.EINVAL, "is not a file")
            while self._held:
                del self._held[: os.write(self._file, self._held)]
            self.waiting = 0
            if durably:
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def temporary(prefix: str, root: Path | None = None) -> Iterator[Path]:
    """A temporary directory that :func:`remove_abandoned` removes if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as folder:
        lock = hold(Path(folder))
        try:
            yield Path(folder)
        finally:
            if lock is not None:
                os.close(lock)


def hold(folder: Path) -> int | None:
    """Lock a directory against :func:`remove_abandoned`, until the returned descriptor is closed or this process ends;
    None if its file system has no locks.

    A process id would not do: one in a container means nothing outside.
    """
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        return lock
    return None


def remove_abandoned(root: Path, prefix: str) -> None:
    """Remove the directories whose names begin so, unless a living process of this machine holds them."""
    for folder in root.glob(f"{prefix}*"):
        # Of another user, or removed meanwhile.
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                if time.time() - folder.stat().st_mtime > _NEW_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of the JSON text of an object."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """An object with its seal; JSON types only."""
    return {**content, SEAL: seal_of(content)}


def _described(error: Exception) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or first_line(error)}"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: byte {error.start}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"has invalid content: {place + ': ' if place else ''}{first['msg']}"
    return f"is damaged: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
