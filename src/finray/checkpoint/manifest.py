"""The manifest that makes a directory a checkpoint: every file with its size and SHA-256, written last."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import TypedDict

from finray.errors import CheckpointError
from finray.files import FileKind, digest_of, sealed

FORMAT_VERSION = 2
NAME = "manifest.json"
_FILES = FileKind(CheckpointError)


class FileEntry(TypedDict):
    """The entry of one file in a manifest."""

    path: str
    bytes: int
    sha256: str


class Content(TypedDict):
    """The content of a manifest."""

    format_version: int
    step: int
    metrics: dict[str, float]
    files: list[FileEntry]


def entry(folder: Path, path: Path) -> FileEntry:
    """Compute the manifest entry of a file."""
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": digest_of(path)}


def write(folder: Path, entries: Iterable[FileEntry], *, step: int, metrics: dict[str, float]) -> None:
    """Write the manifest of a directory with these files."""
    files = sorted(entries, key=lambda item: item["path"])
    content = {"format_version": FORMAT_VERSION, "step": step, "metrics": metrics, "files": files}
    (folder / NAME).write_text(json.dumps(sealed(content), indent=2), encoding="utf-8")


def read(folder: Path, *, step: int | None = None) -> Content:
    """Read a manifest and check its own digest, and its step if given.
    Raises CheckpointError: it is missing, truncated, changed or unreadable."""
    path = folder / NAME
    return parsed(_FILES.read(path), path, step=step)


def parsed(text: bytes, where: Path | str, *, step: int | None = None) -> Content:
    """As :func:`read`, for the text of a manifest."""
    content = _FILES.unsealed(text, Content, where)
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"has format version {content['format_version']}; this finray reads {FORMAT_VERSION}",
            where=str(where),
            repair="use the version of finray that wrote it, or start over with --fresh",
        )
    if step not in (None, content["step"]):
        raise CheckpointError(f"is of step {content['step']}, not {step}", where=str(where))
    for entry in content["files"]:
        # Before anything is downloaded or written under that name.
        _FILES.inside(Path(), entry["path"], where=where)
    return content


def verify(folder: Path, *, digests: bool = True) -> Content:
    """Read a manifest and check every file it lists.
    Raises CheckpointError: names the first file that is missing, truncated, changed or unreadable."""
    content = read(folder)
    verify_files(folder, content["files"], digests=digests)
    return content


def verify_files(folder: Path, entries: Iterable[FileEntry], *, digests: bool = True) -> None:
    """Compare files of a directory with their manifest entries; without ``digests`` only their sizes.

    They lie in the directory: what a link leads to would be copied into the finished model, and published with it.
    Raises CheckpointError: names the first file that is missing, truncated, changed or unreadable.
    """
    for listed in entries:
        path = _FILES.inside(folder, listed["path"], where=folder / NAME)
        _FILES.verify(path, size=listed["bytes"], sha256=listed["sha256"] if digests else None, root=folder)
