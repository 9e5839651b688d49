"""The prepared datasets of a directory or URL: what there is, whether it is whole, and removing it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from finray.config.paths import is_url
from finray.data.dataset.manifest import Manifest, SplitStats, content_of
from finray.data.dataset.plan import fingerprint
from finray.data.dataset.prepared import MANIFEST, PreparedDataset
from finray.data.storage import Folder
from finray.errors import DataError

_PARTIAL = ".partial-"
_NAME = re.compile(r"^(\.partial-)?[0-9a-f]{24}$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One prepared dataset, or what an interrupted preparation left.

    Attributes:
        name: of its directory.
        is_whole: whether it has a manifest.
        rows: of all splits.
        tokens: of all splits.
        size: bytes on disk.
        used: seconds since it was last used, where the storage tells.
        sources: of its rows, by split.
    """

    name: str
    is_whole: bool
    rows: int
    tokens: int
    size: int
    used: float | None
    sources: str

    @property
    def age(self) -> str:
        """``used`` for people."""
        if self.used is None:
            return ""
        for seconds, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
            if self.used >= 2 * seconds:
                return f"{self.used / seconds:.0f} {unit} ago"
        return "just now"


def entries(root: str) -> list[Entry]:
    """All prepared datasets, in the order of their names.

    Raises:
        DataError: the directory or URL does not exist.
    """
    if not is_url(root) and not Path(root).expanduser().is_dir():
        raise DataError("the directory does not exist", where=root, repair="name a config, or where data is prepared")
    sizes: dict[str, int] = {}
    for name, size in Folder(root).files():
        first = name.split("/")[0]
        if _NAME.match(first) and "/" in name:
            sizes[first] = sizes.get(first, 0) + size
    return [_entry(root, name, sizes[name]) for name in sorted(sizes)]


def damaged(root: str, name: str) -> list[str]:
    """The files of a prepared dataset whose content is not what the manifest says."""
    folder = Folder(f"{root.rstrip('/')}/{name}")
    with _not_a_use(folder):
        try:
            dataset = PreparedDataset(folder.root)
        except DataError as error:
            return [error.where or name]
        bad = [] if _is_consistent(dataset.manifest, name) else [folder.at(MANIFEST)]
        for file, expected in dataset.files():
            content = folder.read(file)
            if content is None or hashlib.sha256(content).hexdigest() != expected.sha256:
                bad.append(folder.at(file))
    return bad


def _is_consistent(manifest: Manifest, name: str) -> bool:
    """Whether a manifest is the one of its name, and its digest of the parts is theirs."""
    said = (manifest.fingerprint, manifest.content)
    return said == (name, content_of(manifest.splits)) and fingerprint(manifest.shaped_by) == name


def prune(
    root: str, *, everything: bool = False, damaged_ones: bool = False, older_than_days: float | None = None
) -> list[tuple[str, int]]:
    """Remove unfinished preparations, and the prepared datasets that the arguments choose; returns names and bytes."""
    removed = []
    for entry in entries(root):
        chosen = (
            not entry.is_whole
            or everything
            or (older_than_days is not None and (entry.used or 0.0) > older_than_days * 86400)
            or (damaged_ones and bool(damaged(root, entry.name)))
        )
        if chosen:
            with _unused(root, entry.name) as free:
                if free:
                    _remove(root, entry.name)
                    removed.append((entry.name, entry.size))
    return removed


def _remove(root: str, name: str) -> None:
    """Without its manifest, or under another name, a prepared dataset is none: being killed half-way does no harm."""
    folder = Folder(f"{root.rstrip('/')}/{name}")
    if not folder.is_remote and not name.startswith(_PARTIAL):
        aside = Path(root) / f"{_PARTIAL}{name}"
        if aside.exists():
            Folder(aside).delete()
        Path(folder.root).rename(aside)
        folder = Folder(aside)
    folder.remove(MANIFEST)
    folder.delete()


def _entry(root: str, name: str, size: int) -> Entry:
    folder = Folder(f"{root.rstrip('/')}/{name}")
    used = None if folder.is_remote else max(0.0, time.time() - _last_use(Path(folder.root)))
    with _not_a_use(folder):
        content = folder.read(MANIFEST)
    if content is None or name.startswith(_PARTIAL):
        return Entry(name, False, 0, 0, size, used, "")
    try:
        splits = Manifest.from_bytes(content).splits
        sources = "; ".join(f"{split}: {_files(one)}" for split, one in splits.items())
        counts = [one.counts for one in splits.values()]
        rows, tokens = sum(one.rows for one in counts), sum(one.tokens for one in counts)
    except ValueError:
        return Entry(name, True, 0, 0, size, used, "damaged")
    return Entry(name, True, rows, tokens, size, used, sources)


def _files(split: SplitStats) -> str:
    names = sorted({piece.file for part in split.parts for piece in part.pieces})
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")


@contextmanager
def _not_a_use(folder: Folder) -> Iterator[None]:
    """Reading a manifest here leaves the time it was last read as it is."""
    manifest = Path(folder.root) / MANIFEST
    before = None if folder.is_remote or not manifest.is_file() else manifest.stat()
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))


def _last_use(folder: Path) -> float:
    """When a prepared dataset was written or, where the file system keeps that, last read."""
    manifest = folder / MANIFEST
    stat = (manifest if manifest.is_file() else folder).stat()
    return max(stat.st_mtime, stat.st_atime)


class _unused:
    """Holds the lock of a preparation while it is removed; gives False where somebody is working on it."""

    def __init__(self, root: str, name: str) -> None:
        from filelock import FileLock

        lock = f"{name.removeprefix(_PARTIAL)}.lock"
        self._lock = None if is_url(root) else FileLock(Path(root) / ".locks" / lock, timeout=0)

    def __enter__(self) -> bool:
        from filelock import Timeout

        if self._lock is None:
            return True
        Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        if self._lock is not None and self._lock.is_locked:
            self._lock.release()
