"""Files of a prepared dataset as local paths: where they lie, or fetched into a local directory ahead of their use."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread

from finray.data.dataset.manifest import DataFile
from finray.data.storage import Folder
from finray.errors import DataError

_AT_A_TIME = 4


class LocalFiles:
    """Files on this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str) -> Path:
        """A local path of a file."""
        return self._root / name

    def prefetch(self, names: Iterable[str]) -> None:
        """Nothing to do."""


def default_local_dir() -> Path:
    """Where fetched files are kept unless the config says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "finray" / "prepared"


class RemoteFiles:
    """Files behind a URL, kept in a local directory once fetched, and verified by size and SHA-256.

    Args:
        folder: where they lie.
        fingerprint: names the local directory.
        files: name, and size and SHA-256, of every file.
        local_dir: holds the local directories; None for the user's cache.
    """

    def __init__(
        self, folder: Folder, fingerprint: str, files: Iterable[tuple[str, DataFile]], local_dir: Path | None
    ) -> None:
        self._folder = folder
        self._root = (local_dir or default_local_dir()) / fingerprint
        self._expected = dict(files)
        self._claimed: dict[str, Future[Path]] = {}
        self._wanted: deque[str] = deque()
        self._threads = 0
        self._lock = Lock()

    def path(self, name: str) -> Path:
        """A local path of a file; waits until it is there, and not for those that are fetched ahead.

        Raises:
            DataError: it cannot be fetched, or is damaged.
        """
        return self._claim(name).result()

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to fetch files, the first one first."""
        with self._lock:
            self._wanted.extend(names)
            new = min(_AT_A_TIME - self._threads, len(self._wanted))
            self._threads += new
        for _ in range(new):
            # A process that ends does not wait for what it would have read later.
            Thread(target=self._fetch_ahead, name="finray-fetch", daemon=True).start()

    def _fetch_ahead(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._threads -= 1
                    return
                name = self._wanted.popleft()
            self._claim(name)

    def _claim(self, name: str) -> Future[Path]:
        """The outcome of fetching a file: by this thread, unless another one is at it."""
        with self._lock:
            known = self._claimed.get(name)
            # What failed while it was fetched ahead gets another chance when it is wanted.
            if known is not None and not (known.done() and known.exception() is not None):
                return known
            mine = self._claimed[name] = Future[Path]()
        try:
            mine.set_result(self._fetch(name))
        except BaseException as error:
            mine.set_exception(error)
        return mine

    def _fetch(self, name: str) -> Path:
        target = self._root / name
        expected = self._expected[name]
        # Only whole files carry the final name, so a right size is enough for one that an earlier run fetched.
        if target.is_file() and target.stat().st_size == expected.bytes:
            return target
        content = self._folder.read(name)
        if content is None or hashlib.sha256(content).hexdigest() != expected.sha256:
            raise DataError(
                "a file of the prepared data set is missing or damaged",
                where=self._folder.at(name),
                repair=f"delete {self._folder.root} and run the command again",
            )
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(content)
            os.replace(scratch, target)
        except OSError as error:
            raise DataError(
                f"fetched data cannot be kept: {error.strerror}",
                where=str(self._root),
                repair="set prepare.local_dir to a directory with room",
            ) from None
        return target
