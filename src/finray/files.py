"""The one place that opens what finray reads back: permission, place, size, encoding, shape, digest, seal.

A run, a checkpoint or a model may come from somebody else, with links and fifos in it. So :func:`opened` and
:func:`appending` open regular files only, which lie in the directory that they should; tests/security/test_opening.py
looks for whoever opens files in another way.

Each kind of file defines its error class and repair once; see :class:`FileKind`. A file that cannot
be used is then one message that names it, wherever it is read, and never a traceback.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import DEFAULT_BUFFER_SIZE, BufferedReader, FileIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from finray.errors import FinrayError, first_sentence

T = TypeVar("T")
SEAL = "seal"
# What Python and Pydantic raise for a file that is not what it should be.
_KNOWN = (OSError, ValueError, EOFError, RecursionError)
# Bytes of a line. What is longer was not written by finray, and may have no end.
LINE_BYTES = 64 * 2**20
# A new directory may not be locked yet.
_NEW_S = 60.0
# Digits of a whole number; with more, it may be too large for a float. Transformers itself writes numbers of 31 digits.
_DIGITS = 300
_LONG = re.compile(rb"\d{%d}" % _DIGITS)
# Bytes that wait for room on a disk, before what comes next is lost.
HELD_BYTES = 64 * 2**20
# Made when the first file is read, because that takes milliseconds.
_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True, slots=True)
class FileKind:
    """How files of one kind are read."""

    error: type[FinrayError]  # what is raised where one cannot be used; ``where`` is the file
    repair: str | None = None  # what the user can do then
    limit: int = 256 * 2**20  # bytes that such a file has at most
    # Whether it may be a link to a file elsewhere: a file that the user names, or one of a model directory, which
    # people put together from links. Else it lies in its directory, as :func:`lies_in` sees it.
    links: bool = False

    @contextmanager
    def reading(self, where: Path | str, *, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Whatever goes wrong with a file inside the block, also the errors ``also`` of a library that reads it,
        becomes one error that names it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FinrayError) or not isinstance(error, (*_KNOWN, *also)):
                raise
            raise self.refused(_described(error), where) from None

    def refused(self, message: str, where: Path | str) -> FinrayError:
        """The error of a file."""
        return self.error(message, where=str(where), repair=self.repair)

    @contextmanager
    def opened(self, path: Path, root: Path | None = None) -> Iterator[BufferedReader]:
        """As :func:`opened`; whatever goes wrong inside the block is an error about the file.

        Args:
            path: the file.
            root: the directory that it must lie in; None means the one that it is named in.
        """
        with self.reading(path), opened(path, None if self.links else root or path.parent) as stream:
            yield stream

    def require(self, path: Path, root: Path | None = None) -> Path:
        """The path, for a library that opens it: of a file that :meth:`opened` would open."""
        with self.opened(path, root):
            return path

    def read(self, path: Path, root: Path | None = None) -> bytes:
        """The content of a regular file; ``root`` as for :meth:`opened`."""
        with self.opened(path, root) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > self.limit:
                raise self.refused(f"has {size:,} bytes; at most {self.limit:,} are read", path)
            content = bytearray()
            while part := stream.read(2**20):
                content += part
                # A file that grows, or one of /proc, is longer than it says.
                if len(content) > self.limit:
                    raise self.refused(f"has more than {self.limit:,} bytes", path)
            return bytes(content)

    def text(self, path: Path, root: Path | None = None) -> str:
        """The content of a text file."""
        with self.reading(path):
            return self.read(path, root).decode("utf-8")

    def json(self, path: Path, shape: type[T], root: Path | None = None) -> T:
        """What a JSON file holds: a dataclass, a TypedDict, or plain types. Fields that the shape lacks are ignored."""
        return self.parsed(self.read(path, root), shape, path)

    def parsed(self, content: bytes, shape: type[T], where: Path | str) -> T:
        """As :meth:`json`, of content that was read already."""
        with self.reading(where):
            if _LONG.search(content):
                loads(content)
            return _reader(shape).validate_json(content, strict=True)  # type: ignore[no-any-return]

    def unsealed(self, content: bytes, shape: type[T], where: Path | str) -> T:
        """As :meth:`parsed`, of an object that was made by :func:`sealed` and has not changed since."""
        with self.reading(where):
            record = loads(content)
        if not isinstance(record, dict) or record.pop(SEAL, None) != seal_of(record):
            raise self.refused("was changed after it was written", where)
        return self.parsed(content, shape, where)

    def verify(self, path: Path, *, size: int, sha256: str | None, root: Path | None = None) -> None:
        """Check that a file has the bytes that were written; without a digest, as many."""
        with self.opened(path, root) as stream:
            if (actual := os.fstat(stream.fileno()).st_size) != size:
                raise self.refused(f"has {actual} bytes instead of {size}", path)
            if sha256 is not None and digest_of(path) != sha256:
                raise self.refused("has changed since it was written", path)

    def inside(self, folder: Path, name: str, *, where: Path | str) -> Path:
        """The path of something that a file names, which must lie in its own directory."""
        if not name or "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise self.refused(f"names a file outside its directory: {name!r}", where)
        return folder / name


class NotOpened(OSError):
    """A file that is there, and that finray does not open."""


def opened(path: Path, root: Path | None = None, *, buffer: int = DEFAULT_BUFFER_SIZE) -> BufferedReader:
    """Open a file that somebody else may have put there, to read it.

    Only a regular file is opened: a fifo would wait for its writer, and a device may have no end.

    Args:
        path: the file.
        root: the directory that it must lie in; None for a file that the user has named.
        buffer: as for :func:`open`.

    Raises:
        OSError: it cannot be opened; :class:`NotOpened` if it must not be.
    """
    return BufferedReader(FileIO(_descriptor(path, root, os.O_RDONLY)), buffer)


def appending(path: Path, root: Path | None = None) -> IO[bytes]:
    """Open a file of finray's to write at its end, in a directory that somebody else may have put together.

    Nothing is written through a link: a second name of a file (a hard link) gets a copy of its own first.

    Args:
        path: the file, which may be missing.
        root: the directory that it must lie in; None means the one that it is named in.

    Raises:
        OSError: it cannot be opened; :class:`NotOpened` if it must not be.
    """
    return os.fdopen(_at_its_end(path, root or path.parent), "ab")


def _at_its_end(path: Path, root: Path) -> int:
    with suppress(FileNotFoundError):
        if stat.S_ISREG((status := path.lstat()).st_mode) and status.st_nlink > 1:
            with opened(path) as stream:
                replace_bytes(path, stream.read())
    return _descriptor(path, root, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _descriptor(path: Path, root: Path | None, flags: int) -> int:
    if root is not None and not lies_in(path, root):
        raise NotOpened(errno.EPERM, "is a link to a file outside its directory", str(path))
    if flags & os.O_CREAT and path.is_symlink():
        raise NotOpened(errno.EPERM, "is a link", str(path))
    # Where it must lie somewhere, what was looked at is opened, and not what has taken its name since.
    name, more = (path, 0) if root is None else (os.path.realpath(path), os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags | more | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # A socket, or the writing end of a fifo that nobody reads.
        if error.errno != errno.ENXIO:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise NotOpened(errno.EPERM, "is not a file", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOpened(errno.EPERM, "is not a file", str(path))
    return descriptor


def lies_in(path: Path, root: Path) -> bool:
    """Whether a file lies in a directory once links are followed; in the cache of the Hub, where it keeps files."""
    top = Path(os.path.realpath(root))
    roots = [top]
    for folder in (top, *top.parents):
        if folder.parent.name == "snapshots" and (cache := folder.parent.parent).name.startswith("models--"):
            roots.append(cache / "blobs")
    return any(map(Path(os.path.realpath(path)).is_relative_to, roots))


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, with their ends; one that is longer than any of finray's comes in pieces."""
    return iter(lambda: stream.readline(LINE_BYTES), b"")


def loads(content: bytes) -> Any:
    """JSON without whole numbers that are too large for a float: other code could not take them.
    Raises ValueError: it is no JSON, or has such a number; RecursionError: it is nested too deeply."""
    return json.loads(content, parse_int=_whole if _LONG.search(content) else None)


def _whole(digits: str) -> int:
    if len(digits) >= _DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def typed(content: Any, shape: type[T]) -> T:
    """JSON types as a dataclass or the like. Raises ValueError: they are of another shape."""
    return _reader(shape).validate_json(json.dumps(content), strict=True)  # type: ignore[no-any-return]


def require_writable(folder: Path) -> None:
    """Check that files can be written into a directory, before work is done whose result goes there.
    Raises FinrayError: they cannot."""
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
    """Check that a file can be made, or written again if it is there, before work is done whose result goes into it.
    Raises FinrayError: it cannot."""
    require_writable(path.absolute().parent)
    # Not a pipe, which would wait for its reader.
    if path.is_file():
        try:
            os.close(_descriptor(path, None, os.O_WRONLY))
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
    Raises OSError: with the name of the file."""
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
        """Pass content to the operating system. Raises OSError: it cannot be written now; it is held, or lost."""
        if len(self._held) + len(content) > self._limit:
            self.lost += 1
        else:
            self._held += content
            self.waiting += 1
        self.write()

    def write(self, *, durably: bool = False) -> None:
        """Write what is held; ``durably`` waits for the disk.
        Raises OSError: something is still held, or may not be on disk."""
        with _naming(self._path):
            if self._file is None:
                self._file = _at_its_end(self._path, self._path.parent)
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
    with opened(path) as stream:
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
    if isinstance(error, NotOpened):
        return str(error.strerror)
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
    """What an error's message says in its first line, or its type where it has none."""
    return first_sentence(str(error)) or type(error).__name__
