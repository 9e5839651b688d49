"""Files behind a URL (`s3://`, `gs://`), through fsspec: tried again, compared with what was sent, and replaced whole.

What the storage says of an upload is not believed before it has been compared: by the digest that it keeps of the
content (the ETag of S3, the MD5 of GCS) where that can be worked out here, else by reading the object back.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from finray.errors import CheckpointError, StorageError
from finray.files import digest_of, first_line

T = TypeVar("T")
# Six tries wait for some 30 s together: as long as storage takes to scale up, and no longer than a person waits.
TRIES = 6
_LONGEST_PAUSE_S = 20.0
_OTHERS = 3
# Of what is uploaded in several parts; the ETag of such an object depends on it.
_PART = 64 * 2**20
_PARTS = 9000
_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "az": "azure"}
# What another try would meet again.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it; it remembers no listings.

    Raises:
        StorageError: no library for the scheme is installed, or the URL is malformed.
    """
    import fsspec

    scheme = url.split("://", 1)[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        # Every failure is tried again here, and with the pauses of both it would take minutes to give up.
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
        # Else fsspec would give a file system that it made when the variable named another server.
        options["endpoint_url"] = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        extra = _EXTRAS.get(scheme)
        line = f"`pip install 'finray[{extra}]'`" if extra else f"install the fsspec library for `{scheme}://`"
        raise StorageError(f"nothing installed can write `{scheme}://`", where=url, repair=line) from None
    except (ValueError, OSError) as error:
        repair = "name a directory, or a URL such as s3://bucket/path"
        raise StorageError(f"the URL cannot be used: {first_line(error)}", where=url, repair=repair) from None
    if scheme == "s3":
        fs.retries = 1
    return fs, path.rstrip("/")


class Objects:
    """Reads and writes what lies below a URL.

    Args:
        url: of the folder.
        tries: how often an operation is begun before it fails.
        sleep: waits so many seconds between two tries; replaced in tests.

    Raises:
        StorageError: by all methods, where the storage still fails after the last try.
    """

    def __init__(self, url: str, *, tries: int = TRIES, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = open_filesystem(self.url)
        self._tries = tries
        self._sleep = sleep

    def at(self, name: str) -> str:
        """URL of something inside."""
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes | None:
        """Content of an object, by its name alone; None where there is none."""

        def read() -> bytes:
            content: bytes = self._fs.cat_file(self._inside(name))
            return content

        try:
            return self._retried(name, read)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, and see that it was written."""
        with tempfile.NamedTemporaryFile(prefix="finray-") as stream:
            stream.write(content)
            stream.flush()
            self.upload(Path(stream.name), name)

    def upload(self, path: Path, name: str) -> None:
        """Write a file to an object, and see that it was written; nobody sees half of it."""
        size = path.stat().st_size
        part = max(_PART, math.ceil(size / _PARTS))

        def put() -> None:
            # Sizes of parts are S3's own.
            options = {"chunksize": part} if self.url.startswith("s3://") else {}
            self._fs.put_file(str(path), self._inside(name), **options)
            info = self._fs.info(self._inside(name))
            if int(info["size"] or 0) != size:
                raise _Other(f"{int(info['size'] or 0)} bytes arrived of {size}")
            if not self._has_digest(info, path, part) and self._digest(name) != digest_of(path):
                raise _Other("other bytes arrived than were sent")

        try:
            self._retried(name, put)
        except _OtherForGood as error:
            raise StorageError(error.message, where=self.at(name), repair="run the same command again") from None
        except FileNotFoundError as error:
            # A bucket is not made: whose it would be, and where, is not for finray to say.
            raise StorageError(
                f"nothing can be written there: {first_line(error)}", where=self.at(name), repair="make the bucket"
            ) from None

    def download(self, name: str, path: Path, *, size: int, sha256: str) -> None:
        """Fetch an object whose content is known into a local file, which is replaced whole.

        Raises:
            CheckpointError: it is missing, cut off or changed.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")

        def get() -> None:
            scratch.unlink(missing_ok=True)
            with self._fs.open(self._inside(name), "rb") as source, scratch.open("wb") as target:
                shutil.copyfileobj(source, target, 8 * 2**20)
            found = scratch.stat().st_size
            if found != size:
                raise _Other(f"has {found} bytes instead of {size}")
            if digest_of(scratch) != sha256:
                raise _Other("has other bytes than were written")

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
        """Names of what lies directly inside, as the storage lists it, which may be what was there a while ago."""

        def listed() -> list[str]:
            return [str(one).rstrip("/") for one in self._fs.ls(self._path, detail=False)]

        try:
            found = self._retried("", listed)
        except FileNotFoundError:
            return []
        return sorted(one.rpartition("/")[2] for one in found)

    def files(self, folder: str = "") -> list[str]:
        """Names of all objects below, as the storage lists them, which may be what was there a while ago."""
        root = self._inside(folder) if folder else self._path

        def listed() -> list[str]:
            return [str(one) for one in self._fs.find(root)]

        try:
            return sorted(one[len(self._path) :].lstrip("/") for one in self._retried(folder, listed))
        except FileNotFoundError:
            return []

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the storage; ``target`` is a URL."""
        path = self._fs._strip_protocol(target)
        self._retried(name, lambda: self._fs.cp_file(self._inside(name), path))

    def remove(self, *names: str) -> None:
        """Delete objects, in this order, where they are there."""
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
        """Do something, again where that may help.

        Raises:
            FileNotFoundError: there is nothing of that name.
        """
        error: Exception = OSError()
        others = 0
        for pause in _pauses(self._tries):
            try:
                return action()
            except FileNotFoundError:
                raise
            except _Other as failure:
                # The way may have changed them, and no pause mends what lies there.
                error, others = failure, others + 1
                if others == _OTHERS:
                    break
                continue
            except Exception as failure:
                # File systems raise types of their own libraries (botocore, aiohttp, ...), with no common parent.
                error = failure
                if isinstance(failure, _FINAL):
                    break
            if pause is not None:
                self._sleep(pause)
        if isinstance(error, _Other):
            raise _OtherForGood(str(error))
        said = str(error).strip() and f": {first_line(error)}"
        raise StorageError(
            f"the storage failed {self._tries} times: {type(error).__name__}{said}",
            where=self.at(name),
            repair="check the name, the credentials and the endpoint in the environment (such as AWS_ACCESS_KEY_ID); "
            "the same command then goes on from the last checkpoint",
        ) from None

    def _has_digest(self, info: dict[str, Any], path: Path, part: int) -> bool:
        """Whether the storage itself says that it has the bytes of a file."""
        md5, etag = info.get("md5Hash"), str(info.get("ETag") or "").strip('"')
        if md5:
            return bool(base64.b64decode(md5) == _md5(path))
        if "-" in etag:
            count, parts = 0, hashlib.md5(usedforsecurity=False)
            with path.open("rb") as stream:
                while content := stream.read(part):
                    parts.update(hashlib.md5(content, usedforsecurity=False).digest())
                    count += 1
            return etag == f"{parts.hexdigest()}-{count}"
        return etag == _md5(path).hex()

    def _digest(self, name: str) -> str:
        with self._fs.open(self._inside(name), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


class _Other(Exception):
    """Bytes are not those that they should be; they may be on another try."""


class _OtherForGood(StorageError):
    """They were not on the last try."""


def _pauses(tries: int) -> Iterator[float | None]:
    """Seconds after each failed try, with a random share so that many ranks do not come back at once; None at last."""
    for number in range(tries - 1):
        yield min(_LONGEST_PAUSE_S, 2.0**number) * (0.5 + random.random())
    yield None


def _md5(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).digest()


def upload_folder(folder: Path, objects: Objects, name: str, *, last: Collection[str] = ()) -> None:
    """Write all files of a directory below ``name``; those named ``last`` after the others."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda one: one.name in last):
        objects.upload(path, f"{name}/{path.relative_to(folder).as_posix()}")
