"""The manifest that makes a directory a checkpoint: every file with its size and SHA-256, written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finray.errors import CheckpointError

FORMAT_VERSION = 2
NAME = "manifest.json"


def file_digest(path: Path) -> str:
    """SHA-256, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def entry(folder: Path, path: Path) -> dict[str, Any]:
    """What a manifest says of one file of a directory."""
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": file_digest(path)}


def write(folder: Path, entries: Iterable[dict[str, Any]], *, step: int, metrics: dict[str, float]) -> None:
    """Write the manifest of a directory with these files."""
    files = sorted(entries, key=lambda item: str(item["path"]))
    content = {"format_version": FORMAT_VERSION, "step": step, "metrics": metrics, "files": files}
    (folder / NAME).write_text(json.dumps({**content, "seal": _seal(content)}, indent=2), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Read a manifest and check its own seal.

    Raises:
        CheckpointError: it is missing, cut off or changed.
    """
    path = folder / NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seal = content.pop("seal")
    except FileNotFoundError:
        raise CheckpointError("is missing", where=str(path)) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError("is not a whole manifest", where=str(path)) from None
    if seal != _seal(content):
        raise CheckpointError("was changed after it was written", where=str(path))
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"has format version {content['format_version']}, not {FORMAT_VERSION}", where=str(path))
    return content


def verify(folder: Path) -> dict[str, Any]:
    """Read a manifest and check every file it lists.

    Raises:
        CheckpointError: names the first file that is missing, cut off or changed.
    """
    content = read(folder)
    verify_files(folder, content["files"])
    return content


def verify_files(folder: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Compare files of a directory with their entries in a manifest.

    Raises:
        CheckpointError: names the first file that is missing, cut off or changed.
    """
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file():
            raise CheckpointError("is missing", where=str(path))
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"has {size} bytes instead of {entry['bytes']}", where=str(path))
        if file_digest(path) != entry["sha256"]:
            raise CheckpointError("has other bytes than were written", where=str(path))
