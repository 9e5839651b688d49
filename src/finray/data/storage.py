"""Files, local or behind a URL that fsspec knows (`s3://`, `gs://`, `https://`), through one small set of calls."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
from fsspec.compression import compr

from finray.config.paths import is_url
from finray.errors import DataError

COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "az": "azure"}
# A file that was written this short a time ago may be written again without its times showing it.
_SETTLED_S = 2.0
_BUFFER = 2**20
_AHEAD = 4 * 2**20


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it.

    Raises:
        DataError: no library for the scheme is installed, or the URL is malformed.
    """
    scheme = url.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError:
        extra = _EXTRAS.get(scheme)
        line = f"`pip install 'finray[{extra}]'`" if extra else f"install the fsspec library for `{scheme}://`"
        raise DataError(f"nothing installed can read `{scheme}://`", where=url, repair=line) from None
    except ValueError as error:
        raise DataError(f"the URL cannot be used: {error}", where=url) from None
    return fs, path


def reading_failed(url: str, error: Exception) -> DataError:
    """The error of a URL that cannot be read, without the library's own traceback."""
    lines = str(error).strip().splitlines()
    return DataError(
        f"the storage cannot be reached: {type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "),
        where=url,
        repair="check the name, the credentials and the endpoint in the environment (such as AWS_ACCESS_KEY_ID)",
    )


def open_binary(name: str) -> IO[bytes]:
    """A file for reading, decompressed where its suffix says so.

    Raises:
        DataError: it cannot be opened. Reading from it raises the same where it is remote or compressed.
    """
    try:
        stream: Any = _open_remote(name) if is_url(name) else Path(name).open("rb")  # noqa: SIM115
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("the file does not exist", where=name, repair="check the name") from None
    except Exception as error:
        # File systems raise types of their own libraries (botocore, aiohttp, ...), which have no common parent.
        raise reading_failed(name, error) from None
    if is_url(name):
        stream = io.BufferedReader(_Named(name, stream), _BUFFER)
    if is_compressed(name):
        method = COMPRESSION[PurePosixPath(name).suffix.lower()]
        stream = io.BufferedReader(_Named(name, compr[method](stream, mode="rb"), stream), _BUFFER)
    return stream  # type: ignore[no-any-return]


def _open_remote(name: str) -> Any:
    fs, path = filesystem(name)
    # As much as one wants to read of a piece of a large file; the libraries' own blocks are up to 50 MB.
    return fs.open(path, "rb", block_size=_AHEAD)


class _Named(io.RawIOBase):
    """A stream for Python's own buffering (fsspec's cannot read a line of limited length), whose errors name the file.

    Args:
        name: of the file.
        stream: what is read.
        below: is closed with it.
    """

    def __init__(self, name: str, stream: Any, below: Any = None) -> None:
        self._name = name
        self._stream = stream
        self._below = below

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """As the stream."""
        return bool(self._stream.seekable())

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        try:
            content = self._stream.read(len(buffer))
        except DataError:
            raise
        except Exception as error:
            raise self._failed(error) from None
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        """The position."""
        return int(self._stream.tell())

    def close(self) -> None:
        """Close the stream and what lies below it."""
        if not self.closed:
            self._stream.close()
            if self._below is not None:
                self._below.close()
        super().close()

    def _failed(self, error: Exception) -> DataError:
        if self._below is None:
            return reading_failed(self._name, error)
        return DataError(
            f"the file cannot be decompressed: {error}", where=self._name, repair="write it again; it may be cut off"
        )


def is_compressed(name: str) -> bool:
    """Whether a file is decompressed while it is read, so that it cannot be read from the middle."""
    return PurePosixPath(name).suffix.lower() in COMPRESSION


def file_suffix(name: str) -> str:
    """The suffix that says the format: `.jsonl` of `rows.jsonl.gz`, and of a URL whatever follows `?`."""
    path = PurePosixPath(name.split("?")[0] if name.startswith(("http://", "https://")) else name)
    return (PurePosixPath(path.stem) if path.suffix.lower() in COMPRESSION else path).suffix.lower()


def size(name: str) -> int:
    """Bytes of a file as it is stored.

    Raises:
        DataError: it does not exist or cannot be asked.
    """
    if not is_url(name):
        return Path(name).stat().st_size
    fs, path = filesystem(name)
    try:
        return int(fs.info(path)["size"] or 0)
    except Exception as error:
        raise reading_failed(name, error) from None


def content_digest(name: str, *, cache: DigestCache | None = None) -> str:
    """A digest that changes when the content does: SHA-256 of local files, else what the storage keeps (ETag, ...).

    Raises:
        DataError: the file cannot be read.
    """
    if not is_url(name):
        return (cache or DigestCache(None)).file(Path(name))
    fs, path = filesystem(name)
    try:
        info = fs.info(path)
    except Exception as error:
        raise reading_failed(name, error) from None
    for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified", "mtime"):
        if info.get(key):
            return hashlib.sha256(json.dumps([str(info[key]), info.get("size")]).encode()).hexdigest()
    with open_binary(name) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


class DigestCache:
    """Remembers the SHA-256 of files by size, times and inode, so that an unchanged file is not read again.

    Args:
        path: JSON file to keep them in; None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        if path is not None and path.is_file():
            try:
                self._known = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._known = {}

    def file(self, path: Path) -> str:
        """SHA-256 of a file, in hexadecimal."""
        before = path.stat()
        key = str(path.resolve())
        signature = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
        known = self._known.get(key)
        if known is not None and known[:-1] == signature:
            return str(known[-1])
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        # As in git's index: a file that changed a moment ago could change once more within the clock's resolution.
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
            self._known[key] = [*signature, digest]
            self._save()
        return digest

    def _save(self) -> None:
        if self._path is None:
            return
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(self._known), encoding="utf-8")
            os.replace(scratch, self._path)
        except OSError:
            # Only a convenience: without it the file is read again next time.
            with contextlib.suppress(OSError):
                scratch.unlink()


def find(url: str) -> list[str]:
    """Files behind a URL: itself, those that a pattern matches, or all below a directory; in the order of names.

    Raises:
        DataError: the storage cannot be reached.
    """
    if url.startswith(("http://", "https://")):
        # No directories there, and `?` is no pattern.
        return [url]
    fs, path = filesystem(url)
    try:
        # What was there a while ago is not asked for here; a source that changed must be seen.
        fs.invalidate_cache()
        if set("*?[") & set(path):
            found = fs.glob(path)
        elif fs.isfile(path):
            found = [path]
        else:
            found = fs.find(path)
    except Exception as error:
        raise reading_failed(url, error) from None
    return sorted(fs.unstrip_protocol(item) for item in found)


class Folder:
    """A directory that is written to and read from, local or remote. Objects appear whole or not at all.

    Args:
        root: local path, or URL.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self.is_remote = is_url(self.root)
        if self.is_remote:
            self._fs, self._path = filesystem(self.root)

    def at(self, name: str) -> str:
        """Full name of something inside."""
        return f"{self.root.rstrip('/')}/{name}"

    def sub(self, name: str) -> Folder:
        """A folder inside."""
        return Folder(self.at(name))

    def read(self, name: str) -> bytes | None:
        """Content of a file; None when it is not there."""
        try:
            if not self.is_remote:
                return Path(self.at(name)).read_bytes()
            self._fs.invalidate_cache()
            content: bytes = self._fs.cat_file(f"{self._path}/{name}")
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=self.at(name)) from None
        except Exception as error:
            raise reading_failed(self.at(name), error) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that nobody sees half of it."""
        if self.is_remote:
            try:
                self._fs.pipe_file(f"{self._path}/{name}", content)
            except Exception as error:
                raise reading_failed(self.at(name), error) from None
            return
        scratch = self.scratch(name)
        scratch.write_bytes(content)
        os.replace(scratch, self.at(name))

    def scratch(self, name: str) -> Path:
        """A local path to write to before :meth:`adopt` puts the file in place."""
        target = Path(self.at(name))
        if self.is_remote:
            import tempfile

            handle, path = tempfile.mkstemp(prefix="finray-")
            os.close(handle)
            return Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.with_name(f".{target.name}.{os.getpid()}")

    def adopt(self, scratch: Path, name: str) -> None:
        """Put a finished local file in place."""
        if not self.is_remote:
            os.replace(scratch, self.at(name))
            return
        try:
            self._fs.put_file(str(scratch), f"{self._path}/{name}")
        except Exception as error:
            raise reading_failed(self.at(name), error) from None
        finally:
            scratch.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        if not self.is_remote:
            Path(self.at(name)).unlink(missing_ok=True)
            return
        try:
            self._fs.rm_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return
        except Exception as error:
            raise reading_failed(self.at(name), error) from None

    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file below, in no special order."""
        if not self.is_remote:
            root = Path(self.root)
            for path in root.rglob("*"):
                if path.is_file():
                    yield path.relative_to(root).as_posix(), path.stat().st_size
            return
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._path, detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise reading_failed(self.root, error) from None
        for path, info in found.items():
            yield path[len(self._path) :].lstrip("/"), int(info["size"] or 0)

    def delete(self) -> None:
        """Remove the folder and all that is in it.

        JSON files go first: whoever is killed half-way leaves none that speaks of files which are gone.
        """
        said = [name for name, _ in self.files() if name.endswith(".json")]
        if not self.is_remote:
            import shutil

            for name in said:
                self.remove(name)
            shutil.rmtree(self.root, ignore_errors=True)
            return
        try:
            if said:
                self._fs.rm([f"{self._path}/{name}" for name in said])
            self._fs.invalidate_cache()
            if self._fs.exists(self._path):
                self._fs.rm(self._path, recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise reading_failed(self.root, error) from None
