"""Lists, verifies and removes the prepared datasets in a directory or URL."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from finray.config.paths import is_url
from finray.data.dataset.manifest import MANIFEST, Manifest
from finray.data.dataset.prepare import locked
from finray.data.dataset.prepared import PreparedDataset
from finray.data.storage import Folder
from finray.errors import DataError

_PARTIAL = ".partial-"
_NAME = re.compile(r"^(\.partial-)?[0-9a-f]{24}$")


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """A prepared dataset, or the remains of an interrupted preparation."""

    name: str  # of its directory
    is_whole: bool  # whether it has a manifest
    size: int  # bytes on disk
    used: float | None  # seconds since a preparation last wrote or used it, if the storage records that
    rows: int = 0  # total over all splits
    tokens: int = 0  # total over all splits
    sources: str = ""  # of its rows, by split

    @property
    def age(self) -> str:
        """``used`` as text."""
        if self.used is None:
            return ""
        for seconds, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
            if self.used >= 2 * seconds:
                return f"{self.used / seconds:.0f} {unit} ago"
        return "just now"


def entries(root: str) -> list[CachedDataset]:
    """All prepared datasets, in the order of their names. Raises DataError: the directory or URL does not exist."""
    if not is_url(root) and not Path(root).expanduser().is_dir():
        raise DataError(
            "the directory does not exist", where=root, repair="give a config, or the directory of prepared data"
        )
    sizes: dict[str, int] = {}
    for name, size in Folder(root).files():
        first = name.split("/")[0]
        if _NAME.match(first) and "/" in name:
            sizes[first] = sizes.get(first, 0) + size
    datasets = []
    for name, size in sorted(sizes.items()):
        folder, used = _folder(root, name), None
        if not folder.is_remote:
            manifest = Path(folder.at(MANIFEST))
            used = max(0.0, time.time() - (manifest if manifest.is_file() else Path(folder.root)).stat().st_mtime)
        content = folder.read(MANIFEST)
        if content is None or name.startswith(_PARTIAL):
            datasets.append(CachedDataset(name, False, size, used))
            continue
        try:
            splits = Manifest.from_bytes(content, folder).splits
        except DataError:
            datasets.append(CachedDataset(name, True, size, used, sources="damaged"))
            continue
        sources = []
        for split, stats in splits.items():
            files = sorted({piece.file for part in stats.parts for piece in part.pieces})
            sources.append(f"{split}: {', '.join(files[:2])}{' ...' if len(files) > 2 else ''}")
        rows, tokens = sum(counts.rows for counts in splits.values()), sum(counts.tokens for counts in splits.values())
        datasets.append(CachedDataset(name, True, size, used, rows, tokens, "; ".join(sources)))
    return datasets


def damaged(root: str, name: str) -> list[str]:
    """The files of a prepared dataset that do not match the manifest."""
    folder = _folder(root, name)
    try:
        dataset = PreparedDataset(folder.root)
    except DataError as error:
        return [error.where or name]
    # The manifest must match the directory's name.
    bad = [] if dataset.name == name else [folder.at(MANIFEST)]
    for file, expected in dataset.files():
        content = folder.read(file)
        if content is None or hashlib.sha256(content).hexdigest() != expected.sha256:
            bad.append(folder.at(file))
    return bad


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
        if not chosen:
            continue
        with locked(root, entry.name.removeprefix(_PARTIAL)) as free:
            if free:
                folder = _folder(root, entry.name)
                # Without its manifest, or under another name, it is not a prepared dataset: a kill half-way is
                # harmless.
                if not folder.is_remote and not entry.name.startswith(_PARTIAL):
                    aside = _folder(root, f"{_PARTIAL}{entry.name}")
                    Path(folder.root).rename(aside.root)
                    folder = aside
                folder.remove(MANIFEST)
                folder.delete()
                removed.append((entry.name, entry.size))
    return removed


def _folder(root: str, name: str) -> Folder:
    return Folder(f"{root.rstrip('/')}/{name}")
