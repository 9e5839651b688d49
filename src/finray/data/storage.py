"""Local and remote files (`s3://`, `gs://`, `https://`), through fsspec, with finray's errors."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import posixpath
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec

from finray.config.paths import is_url
from finray.errors import DataError, DataUnavailable
from finray.files import FileKind, appending, digest_of, first_line
from finray.files import opened as open_file
from finray.pretrained import remote


def _zstd(stream: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")


COMPRESSION: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
_SILENT = "check the address and the network"
# A file modified less than this long ago may change again without its timestamps showing it.
_SETTLED_S = 2.0
# After this many outdated lines, the file of digests is rewritten.
_STALE = 1000
_BUFFER = 2**20
# Read-ahead for a piece of a large file; the libraries' own blocks are up to 50 MB.
_AHEAD = 4 * 2**20


def filesystem(name: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path within it.
    Raises DataError: no library for the scheme is installed, the URL is malformed, or the storage does not answer."""
    if not is_url(name):
        # A local name may contain what fsspec would interpret (`::`, `~`).
        return fsspec.filesystem("file"), str(Path(name).absolute())
    scheme = name.split("://", 1)[0]
    options = remote.options(scheme)
    fs, path = remote.filesystem(name, options, error=DataError, use="read", repair="name another source")
    if (silence := remote.silence(fs, scheme)) is not None:
        address, waited = silence
        raise DataUnavailable(f"the server gave {waited}", where=address, repair=_SILENT)
    return fs, path


def _require_answer(url: str) -> None:
    """Refuse an unresponsive server: the libraries would wait for minutes, twice."""
    if (waited := remote.unanswered(url)) is not None:
        raise DataUnavailable(f"the server gave {waited}", where=url, repair=_SILENT)


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Convert any error about a file or directory into a :class:`DataError` that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        import pyarrow as pa

        is_arrows = isinstance(error, pa.ArrowException)
        # Bad content is also reported as an OSError without errno.
        no_number = type(error) is OSError and error.errno is None
        if is_arrows or no_number or isinstance(error, EOFError | gzip.BadGzipFile | zlib.error | lzma.LZMAError):
            message, repair = "the file is damaged or cut off", "write or fetch it again"
            if is_compressed(name) and not is_arrows:
                message, repair = "the file cannot be decompressed", "write it again; it may be cut off"
            raise DataError(f"{message}: {first_line(error)}", where=name, repair=repair) from None
        if is_url(name) and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            # So fsspec calls whatever a web server did; if the file is missing there, the cause says so too.
            error = error.__cause__
        if isinstance(error, FileNotFoundError):
            what = "bucket" if is_url(name) and "bucket does not exist" in str(error) else "file"
            raise DataError(f"the {what} does not exist", where=name, repair="check the name") from None
        if is_url(name):
            # Another attempt would be refused too.
            kind = DataError if isinstance(error, PermissionError) else DataUnavailable
            message = f"the storage cannot be reached: {remote.described(error)}"
            raise kind(message, where=name, repair=remote.CREDENTIALS) from None
        if isinstance(error, OSError):
            raise DataError(f"cannot be read: {error.strerror or error}", where=name) from None
        raise


def _stream(name: str) -> IO[bytes]:
    if not is_url(name):
        return open_file(Path(name), buffer=_BUFFER)
    fs, path = filesystem(name)
    # fsspec's own streams cannot read a line of limited length.
    return io.BufferedReader(fs.open(path, "rb", block_size=_AHEAD), _BUFFER)


@contextmanager
def opened(name: str) -> Iterator[IO[bytes]]:
    """A file for reading, decompressed according to its suffix.
    Raises DataError: it cannot be opened, or cannot be read before it is closed."""
    with storage_errors(name), _stream(name) as stream:
        if not is_compressed(name):
            yield stream
            return
        unpack = COMPRESSION[_outer_suffix(name)]
        with io.BufferedReader(unpack(stream), _BUFFER) as unpacked:
            # Tables are read from their end; Zstandard is unpacked from the start only.
            is_table = file_suffix(name) in (".parquet", ".arrow", ".feather")
            yield io.BytesIO(unpacked.read()) if is_table and not unpacked.seekable() else unpacked


def is_compressed(name: str) -> bool:
    """Whether a file is decompressed while it is read, so that it cannot be read from the middle."""
    return _outer_suffix(name) in COMPRESSION


def file_suffix(name: str) -> str:
    """The suffix that determines the format: `.jsonl` for `rows.jsonl.gz`; for a URL without what follows `?`."""
    suffix = _outer_suffix(name)
    return posixpath.splitext(_without_query(name)[: -len(suffix)])[1] if suffix in COMPRESSION else suffix


def _outer_suffix(name: str) -> str:
    # Without touching the file: a folder may have many thousands, each looked up several times.
    return posixpath.splitext(_without_query(name))[1]


def _without_query(name: str) -> str:
    return (name.split("?")[0] if name.startswith(("http://", "https://")) else name).rstrip("/").lower()


def size(name: str) -> int:
    """Size of a file in bytes, as stored. Raises DataError: it does not exist or cannot be queried."""
    with storage_errors(name):
        if not is_url(name):
            return Path(name).stat().st_size
        fs, path = filesystem(name)
        return int(fs.info(path)["size"] or 0)


def find(url: str) -> list[str]:
    """Files behind a URL: itself, the matches of a pattern, or all below a directory that are not hidden; sorted.
    Raises DataError: the storage cannot be reached."""
    if url.startswith(("http://", "https://")):
        _require_answer(url)
        # HTTP has no directories, and `?` is not a pattern.
        return [url]
    with storage_errors(url):
        fs, path = filesystem(url)
        # A cached listing would hide changes of the source.
        fs.invalidate_cache()
        if set("*?[") & set(path):
            paths = [item for item, about in fs.glob(path, detail=True).items() if about["type"] == "file"]
        elif fs.isfile(path):
            paths = [path]
        else:
            paths = [item for item in fs.find(path) if "/." not in f"/{item.removeprefix(path).lstrip('/')}"]
        return sorted(fs.unstrip_protocol(item) for item in paths)


class Digests:
    """Digests of files. The SHA-256 of a local file is cached by size, times and inode.

    Args:
        path: append-only cache file, with one line of JSON per file; None disables the cache.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        # By absolute path: size, times, inode, and SHA-256.
        self._known: dict[str, list[Any]] = {}
        if path is not None:
            lines: list[bytes] = []
            # Only a cache: what cannot be read is computed again.
            with suppress(DataError):
                lines = FileKind(DataError).read(path).splitlines()
            for line in lines:
                with suppress(ValueError, TypeError):
                    *entry, check = json.loads(line)
                    if check == zlib.crc32(json.dumps(entry).encode()):
                        self._known[entry[0]] = entry[1:]
            if len(lines) > 2 * len(self._known) + _STALE:
                with suppress(OSError):
                    Folder(path.parent).write(path.name, b"".join(map(_line, self._known.items())))

    def of(self, name: str | Path) -> str:
        """A digest that changes with the content: SHA-256 of a local file, else the storage's own (ETag, ...).
        Raises DataError: the file cannot be read; FileNotFoundError: a local file does not exist."""
        if not is_url(str(name)):
            return self._of_local(Path(name))
        url = str(name)
        with storage_errors(url):
            fs, path = filesystem(url)
            info = fs.info(path)
        for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified", "mtime"):
            if info.get(key):
                return hashlib.sha256(json.dumps([str(info[key]), info.get("size")]).encode()).hexdigest()
        with opened(url) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]

    def _of_local(self, path: Path) -> str:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            # A device may have no end.
            raise DataError("is not a file", where=str(path), repair="name a file")
        # A link that now points elsewhere has the size, times and inode of another file.
        key = str(path.absolute())
        signature = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
        cached = self._known.get(key)
        if cached is not None and cached[:-1] == signature:
            return str(cached[-1])
        with storage_errors(str(path)):
            digest = digest_of(path)
        # As in git's index: a recently changed file could change again within the clock's resolution.
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
            self._known[key] = [*signature, digest]
            if self._path is not None:
                # Only a cache: without it the file is read again next time.
                with suppress(OSError):
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    with appending(self._path) as stream:
                        stream.write(_line((key, self._known[key])))
        return digest


def _line(item: tuple[str, list[Any]]) -> bytes:
    """The cache line of a file, with a checksum."""
    entry = [item[0], *item[1]]
    return json.dumps([*entry, zlib.crc32(json.dumps(entry).encode())]).encode() + b"\n"


class Folder:
    """A directory for reading and writing, local or remote. Files appear atomically.

    Args:
        root: local path, or URL.

    Raises:
        DataError: by all methods, if the storage fails; an OSError if a local file cannot be written.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self.is_remote = is_url(self.root)
        self._fs, self._path = filesystem(self.root)

    def at(self, name: str) -> str:
        """Full name of something inside."""
        return f"{self.root.rstrip('/')}/{name}"

    def sub(self, name: str) -> Folder:
        """A folder inside."""
        return Folder(self.at(name))

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it does not exist."""
        with storage_errors(self.at(name)), suppress(FileNotFoundError, NotADirectoryError):
            if not self.is_remote:
                with open_file(Path(self.at(name)), Path(self.root)) as stream:
                    return stream.read()
            self._fs.invalidate_cache()
            content: bytes = self._fs.cat_file(f"{self._path}/{name}")
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        scratch = self.scratch(name)
        try:
            scratch.write_bytes(content)
            self.adopt(scratch, name)
        finally:
            scratch.unlink(missing_ok=True)

    def scratch(self, name: str) -> Path:
        """A local path to write to before :meth:`adopt` moves the file into place; the caller removes it."""
        if self.is_remote:
            handle, path = tempfile.mkstemp(prefix="finray-")
            os.close(handle)
            return Path(path)
        target = Path(self.at(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.with_name(f".{target.name}.{os.getpid()}")

    def adopt(self, scratch: Path, name: str) -> None:
        """Move a finished local file into place."""
        if not self.is_remote:
            os.replace(scratch, self.at(name))
            return
        with storage_errors(self.at(name)):
            self._fs.put_file(str(scratch), f"{self._path}/{name}")

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with storage_errors(self.at(name)), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._path}/{name}")

    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file below, in no special order."""
        listing = {}
        with storage_errors(self.root), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            listing = self._fs.find(self._path, detail=True)
        for path, info in listing.items():
            yield path[len(self._path) :].lstrip("/"), int(info["size"] or 0)

    def delete(self) -> None:
        """Remove the folder and everything in it.

        JSON files go first: a kill half-way leaves none that refers to deleted files.
        """
        listings = [f"{self._path}/{name}" for name, _ in self.files() if name.endswith(".json")]
        with storage_errors(self.root), suppress(FileNotFoundError):
            if listings:
                self._fs.rm(listings)
            if not self.is_remote:
                # On some file systems, a file that is still memory-mapped cannot be removed.
                shutil.rmtree(self._path, ignore_errors=True)
                return
            self._fs.invalidate_cache()
            if self._fs.exists(self._path):
                self._fs.rm(self._path, recursive=True)
