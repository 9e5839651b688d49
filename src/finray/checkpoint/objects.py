"""Files behind a URL (`s3://`, `gs://`), through fsspec: with retries, verified, and replaced atomically.

An upload is verified before it counts: by the digest that the storage keeps (the ETag of S3, the MD5 of GCS) if it can
be computed here, else by reading the object back.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from finray.errors import CheckpointError, StorageError
from finray.files import digest_of, first_line, opened
from finray.pretrained import remote

T = TypeVar("T")
# Six tries take some 30 s in total: as long as storage takes to scale up, and no longer than a person waits.
TRIES = 6
_LONGEST_PAUSE_S = 20.0
_OTHERS = 3
# Part size of multipart uploads, on which the object's ETag depends.
_PART = 64 * 2**20
_PARTS = 9000
# Errors that a retry would hit again.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def open_filesystem(url: str, *, patient: bool = False) -> tuple[Any, str]:
    """The file system of a URL, and the path within it; without a cache of listings.
    Raises StorageError: no library for the scheme is installed, the URL is malformed, or, unless ``patient``, the
    storage does not answer."""
    scheme = url.split("://", 1)[0]
    options = remote.options(scheme) | {"use_listings_cache": False}
    if scheme == "s3":
        # Retries happen here; with both, it would take minutes to give up.
        options["config_kwargs"] |= {"retries": {"total_max_attempts": 1}}
    repair = "name a directory, or a URL such as s3://bucket/path"
    fs, path = remote.filesystem(url, options, error=StorageError, use="write", repair=repair)
    if scheme == "s3":
        fs.retries = 1
    if not patient and (silence := remote.silence(fs, scheme)) is not None:
        address, waited = silence
        raise StorageError(
            f"the storage gave {waited}: {address}", where=url, repair="check the address and the network"
        )
    return fs, path.rstrip("/")


class Objects:
    """Reads and writes objects below a URL.

    Args:
        url: of the folder.
        patient: do not ask first whether the storage answers. For a run that goes on: it waits for storage that is
            away for a moment.
        tries: number of attempts of an operation.
        sleep: sleeps for the given seconds between attempts; replaced in tests.

    Raises:
        StorageError: by all methods, if the storage still fails at the last attempt; and as
            :func:`open_filesystem`.
    """

    def __init__(
        self,
        url: str,
        *,
        patient: bool = False,
        tries: int = TRIES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = open_filesystem(self.url, patient=patient)
        self._tries = tries
        self._sleep = sleep

    def at(self, name: str) -> str:
        """URL of an object or folder inside."""
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes | None:
        """Content of an object, looked up directly by its name; None if there is none."""

        def read() -> bytes:
            content: bytes = self._fs.cat_file(self._inside(name))
            return content

        try:
            return self._retried(name, read)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, and verify it."""
        with tempfile.NamedTemporaryFile(prefix="finray-") as stream:
            stream.write(content)
            stream.flush()
            self.upload(Path(stream.name), name)

    def upload(self, path: Path, name: str) -> None:
        """Write a file to an object atomically, and verify it."""
        size = path.stat().st_size
        part = max(_PART, math.ceil(size / _PARTS))

        def put() -> None:
            # fsspec's S3 file system takes a part size.
            options = {"chunksize": part} if self.url.startswith("s3://") else {}
            self._fs.put_file(str(path), self._inside(name), **options)
            info = self._fs.info(self._inside(name))
            if int(info["size"] or 0) != size:
                raise _Other(f"{int(info['size'] or 0)} of {size} bytes arrived")
            if not _has_digest(info, path, part):
                with self._fs.open(self._inside(name), "rb") as stream:
                    arrived = hashlib.file_digest(stream, "sha256").hexdigest()
                if arrived != digest_of(path):
                    raise _Other("the bytes that arrived are not the bytes that were sent")

        try:
            self._retried(name, put)
        except _OtherForGood as error:
            raise StorageError(error.message, where=self.at(name), repair="run the same command again") from None
        except FileNotFoundError as error:
            # finray does not create buckets: it cannot know the owner and the region.
            raise StorageError(
                f"cannot write there: {first_line(error)}", where=self.at(name), repair="create the bucket"
            ) from None

    def download(self, name: str, path: Path, *, size: int, sha256: str) -> None:
        """Download an object with known content to a local file, which is replaced atomically.
        Raises CheckpointError: it is missing, truncated or changed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")

        def get() -> None:
            with self._fs.open(self._inside(name), "rb") as source, scratch.open("wb") as target:
                shutil.copyfileobj(source, target, 8 * 2**20)
            arrived = scratch.stat().st_size
            if arrived != size:
                raise _Other(f"has {arrived} bytes instead of {size}")
            if digest_of(scratch) != sha256:
                raise _Other("has changed since it was written")

        try:
            self._retried(name, get)
            os.replace(scratch, path)
        except FileNotFoundError:
            raise CheckpointError("is missing", where=self.at(name)) from None
        except _OtherForGood as error:
            raise CheckpointError(error.message, where=self.at(name)) from None
        finally:
            scratch.unlink(missing_ok=True)

    def folders(self) -> list[str]:
        """Names of folders directly inside, as listed by the storage; the listing may be outdated."""

        def listed() -> list[str]:
            return [str(path).rstrip("/") for path in self._fs.ls(self._path, detail=False)]

        try:
            paths = self._retried("", listed)
        except FileNotFoundError:
            return []
        return sorted(path.rpartition("/")[2] for path in paths)

    def files(self, folder: str = "") -> list[str]:
        """Names of all objects below, as listed by the storage; the listing may be outdated."""
        root = self._inside(folder) if folder else self._path

        def listed() -> list[str]:
            return [str(path) for path in self._fs.find(root)]

        try:
            return sorted(path[len(self._path) :].lstrip("/") for path in self._retried(folder, listed))
        except FileNotFoundError:
            return []

    def age_s(self, name: str) -> float:
        """Seconds since an object was written, by the storage's clock; 0 if the storage does not say."""
        with suppress(Exception):
            written: datetime = self._fs.modified(self._inside(name))
            return (datetime.now(UTC) - written).total_seconds()
        return 0.0

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the storage; ``target`` is a URL."""
        path = self._fs._strip_protocol(target)
        self._retried(name, lambda: self._fs.cp_file(self._inside(name), path))

    def remove(self, *names: str) -> None:
        """Delete objects in this order, if they exist."""
        for name in names:

            def remove(name: str = name) -> None:
                self._fs.rm_file(self._inside(name))

            try:
                self._retried(name, remove)
            except FileNotFoundError:
                continue

    def _inside(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _retried(self, name: str, action: Callable[[], T]) -> T:
        """Run an action, with retries if they may help. Raises FileNotFoundError: there is no such object."""
        error: Exception = OSError()
        others = 0
        for pause in _pauses(self._tries):
            try:
                return action()
            except FileNotFoundError:
                raise
            except _Other as failure:
                # Bytes may have changed in transit, and a pause does not repair what is stored.
                error, others = failure, others + 1
                if others == _OTHERS:
                    break
                continue
            except Exception as failure:
                error = failure
                if isinstance(failure, _FINAL):
                    break
            if pause is not None:
                self._sleep(pause)
        if isinstance(error, _Other):
            raise _OtherForGood(str(error))
        raise StorageError(
            f"the storage failed {self._tries} times: {remote.described(error)}",
            where=self.at(name),
            repair=f"{remote.CREDENTIALS}; the same command then continues from the last checkpoint",
        ) from None


class _Other(Exception):
    """The bytes do not match; they may on another attempt."""


class _OtherForGood(StorageError):
    """The bytes did not match on the last attempt."""


def _pauses(tries: int) -> Iterator[float | None]:
    """Seconds after each failed attempt, with jitter so that many ranks do not retry at once; finally None."""
    for number in range(tries - 1):
        yield min(_LONGEST_PAUSE_S, 2.0**number) * (0.5 + random.random())
    yield None


def _has_digest(info: dict[str, Any], path: Path, part: int) -> bool:
    """Whether the digest that the storage keeps, of parts of this size, matches the file."""
    md5, etag = info.get("md5Hash"), str(info.get("ETag") or "").strip('"')
    with opened(path) as stream:
        if not md5 and "-" in etag:
            count, parts = 0, hashlib.md5(usedforsecurity=False)
            while content := stream.read(part):
                parts.update(hashlib.md5(content, usedforsecurity=False).digest())
                count += 1
            return etag == f"{parts.hexdigest()}-{count}"
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return bool(base64.b64decode(md5) == digest.digest()) if md5 else etag == digest.hexdigest()
