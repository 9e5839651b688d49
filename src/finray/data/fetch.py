"""Files of a prepared dataset as local paths: where they lie, or fetched into a local directory ahead of their use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

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

    def ahead(self, names: Iterable[str]) -> None:
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
        self, folder: Folder, fingerprint: str, files: Iterable[tuple[str, dict[str, Any]]], local_dir: Path | None
    ) -> None:
        self._folder = folder
        self._root = (local_dir or default_local_dir()) / fingerprint
        self._expected = dict(files)
        self._pool = ThreadPoolExecutor(max_workers=_AT_A_TIME, thread_name_prefix="finray-fetch")
        self._running: dict[str, Future[Path]] = {}
        self._lock = Lock()

    def path(self, name: str) -> Path:
        """A local path of a file; waits until it is there.

        Raises:
            DataError: it cannot be fetched, or is damaged.
        """
        return self._submit(name).result()

    def ahead(self, names: Iterable[str]) -> None:
        """Begin to fetch files, the first one first."""
        for name in names:
            self._submit(name)

    def _submit(self, name: str) -> Future[Path]:
        with self._lock:
            if name not in self._running:
                self._running[name] = self._pool.submit(self._fetch, name)
            return self._running[name]

    def _fetch(self, name: str) -> Path:
        target = self._root / name
        expected = self._expected[name]
        # Only whole files carry the final name, so a right size is enough for one that an earlier run fetched.
        if target.is_file() and target.stat().st_size == expected["bytes"]:
            return target
        content = self._folder.read(name)
        if content is None or hashlib.sha256(content).hexdigest() != expected["sha256"]:
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
