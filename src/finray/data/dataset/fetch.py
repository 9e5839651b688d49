"""Files of a prepared dataset as local paths, verified: where they lie, or fetched into a local directory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Semaphore, Thread

from finray.data.dataset.manifest import DataFile, files_of
from finray.data.storage import Folder
from finray.errors import DataError

_AT_A_TIME = 4


class DatasetFiles:
    """Files of a prepared dataset, each compared with its size and SHA-256 before it is first read.

    That costs a nanosecond or two for each token. Those behind a URL are kept in a local directory.

    fsspec's `filecache` would verify nothing, fetch nothing ahead, and let two processes of a machine write one file.

    Args:
        folder: where they lie.
        fingerprint: names the local directory.
        local_dir: holds the local directories; None for the user's cache.
    """

    def __init__(
        self, folder: Folder, fingerprint: str, files: Iterable[tuple[str, DataFile]], local_dir: Path | None
    ) -> None:
        self._folder = folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._root = (local_dir or cache / "finray" / "prepared") / fingerprint
        self._expected = dict(files)
        self._kind = files_of(folder)
        # What is as it was written, by a comparison in this process or elsewhere.
        self._verified: set[str] = set()
        self._locks = {name: Lock() for name in self._expected}
        self._wanted: deque[str] = deque()
        self._turns = Semaphore(_AT_A_TIME)

    def path(self, name: str) -> Path:
        """A local path of a file; waits until it is there, and not for those that are fetched ahead.
        Raises DataError: it cannot be fetched, or is damaged."""
        with self._locks[name]:
            if self._folder.is_remote:
                return self._fetched(name)
            target = Path(self._folder.at(name))
            self._verify(name, target)
            return target

    def trust(self) -> None:
        """Compare no file where it lies any more."""
        if not self._folder.is_remote:
            self._verified.update(self._expected)

    def _verify(self, name: str, target: Path) -> None:
        if name not in self._verified:
            expected = self._expected[name]
            self._kind.verify(target, size=expected.bytes, sha256=expected.sha256)
            self._verified.add(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to fetch files, the first one first."""
        if self._folder.is_remote:
            self._wanted.extend(names)
            for _ in range(min(_AT_A_TIME, len(self._wanted))):
                # A process that ends does not wait for what it would have read later.
                Thread(target=self._fetch_ahead, name="finray-fetch", daemon=True).start()

    def _fetch_ahead(self) -> None:
        with self._turns, suppress(IndexError):
            while True:
                name = self._wanted.popleft()
                # What fails here gets another chance when it is wanted, and is reported then.
                with suppress(Exception):
                    self.path(name)

    def _fetched(self, name: str) -> Path:
        target = self._root / name
        expected = self._expected[name]
        with suppress(DataError):
            # Of an earlier run; one that is damaged is fetched again.
            self._verify(name, target)
            return target
        content = self._folder.read(name)
        if content is None or hashlib.sha256(content).hexdigest() != expected.sha256:
            raise DataError(
                "a file of the prepared dataset is missing or damaged",
                where=self._folder.at(name),
                repair=f"delete {self._folder.root} and run the command again",
            )
        try:
            Folder(self._root).write(name, content)
        except OSError as error:
            raise DataError(
                f"fetched data cannot be saved: {error.strerror}",
                where=str(self._root),
                repair="set prepare.local_dir to a directory with free space",
            ) from None
        self._verified.add(name)
        return target
