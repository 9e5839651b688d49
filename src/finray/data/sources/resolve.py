"""Resolves source names: local or remote files that finray reads itself, or a dataset that ``datasets`` reads.

finray reads files itself because an error in a file must be reported by file and row; see ``readers.py``.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from finray.config.paths import is_url
from finray.data.storage import COMPRESSION, file_suffix, find, storage_errors
from finray.errors import DataError, did_you_mean_path
from finray.limits import cut

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
_TEXT_SUFFIXES = """
    txt text md rst tex org html xml log srt ipynb toml yaml yml ini cfg mk cmake proto sql sh bash ps1 vim
    py pyi rs c h cc cpp hpp cu go java kt scala js jsx ts tsx rb php swift lua pl r jl hs ml ex exs erl clj cs fs
    dart zig nim v vhd sol asm s f90 el lisp scm tcl m mm
"""
TEXTS = frozenset(f".{suffix}" for suffix in _TEXT_SUFFIXES.split())
_READABLE = frozenset((*TABLES, *TEXTS))
# Characters of the names of files that are not read.
_NAMES = 80
# Prefixes of file names that indicate a split, with synonyms.
_SAME_SPLIT = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing"), ("eval",))
SPLITS = tuple(name for names in _SAME_SPLIT for name in names)
_GLOB_CHARACTERS = frozenset("*?[")
_NOT_THERE = "check data.source and the working directory"
_END = r"(?:-?\d[\d_]*%?)?"
_SLICE = re.compile(rf"^(?P<name>[^\[\]+]+?)(?:\[(?P<start>{_END}):(?P<stop>{_END})\])?$")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source row: path, URL or dataset name, the row number in it (from 1), and its columns."""

    file: str
    number: int
    value: dict[str, Any]

    @property
    def where(self) -> str:
        """``file:row``, for messages."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of rows, as in ``train[:1%]``; bounds are row numbers or percentages, negative ones count from the
    end."""

    start: str
    stop: str

    def of(self, rows: int) -> tuple[int, int]:
        """First row and the one after the last, for a source with this many rows.

        Percentages are rounded to the nearest row, halves to even, as ``datasets`` does.
        """
        low = _position(self.start, rows, default=0)
        return low, max(low, _position(self.stop, rows, default=rows))


def _position(text: str, rows: int, *, default: int) -> int:
    if not text:
        return default
    value = round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)
    return min(max(value + rows if value < 0 or text.startswith("-") else value, 0), rows)


@dataclass(frozen=True)
class Source:
    """A resolved source.

    name: as given by the user.
        name: as the user wrote it.
        files: paths or URLs that finray reads itself; empty if ``datasets`` reads them.
        subset: configuration of a Hugging Face dataset.
        revision: of a Hugging Face dataset.
        split: split name; with its slice if ``datasets`` reads it.
        data_dir: directory inside a Hugging Face dataset.
        slice: rows to keep, if finray reads them.
    """

    name: str
    files: tuple[str, ...] = ()
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    data_dir: str | None = None
    slice: Slice | None = None

    @property
    def is_files(self) -> bool:
        """Whether finray reads the rows itself."""
        return bool(self.files)

    def short(self, file: str) -> str:
        """A file's name without the path common to all files, so that it does not depend on the source's location."""
        return self._short.get(file, file)

    @cached_property
    def _short(self) -> dict[str, str]:
        # Computed once: there may be many thousands of files, each looked up.
        depth = _shared_depth(self.files) if self.files else 0
        # The query of a URL may be a signature: secret, and different tomorrow.
        plain = {
            file: file.partition("?")[0] if file.startswith(("http://", "https://")) else file for file in self.files
        }
        return {file: str(PurePosixPath(*PurePosixPath(name).parts[depth:])) for file, name in plain.items()}


def _shared_depth(files: Sequence[str]) -> int:
    """Number of leading folders that all files share."""
    parents = {posixpath.dirname(file) for file in files}
    return len(PurePosixPath(os.path.commonpath([PurePosixPath(parent) for parent in parents])).parts)


def resolve(name: str, *, split: str, subset: str | None = None, revision: str | None = None) -> Source:
    """Resolve a source name.

    A path that exists is read from disk; so is a glob, and so are URLs. Files in a directory whose names start with the
    wanted split (``train.jsonl``, ``validation-00000.parquet``) are that split; without such names every file belongs
    to it. ``org/name:data_dir`` is a directory in a Hugging Face dataset. Raises DataError: nothing is found, or
    nothing readable.
    """
    is_pattern = bool(_GLOB_CHARACTERS & set(name))
    if is_url(name):
        there = find(name)
        files = [file for file in there if file_suffix(file) in _READABLE]
        # A name that ends like the only file found is that file.
        is_file = len(there) == 1 and posixpath.basename(there[0]) == posixpath.basename(name.rstrip("/"))
        if not files and not is_file:
            raise DataError(
                "there are no data files", where=name, repair="check data.source; a directory must hold data files"
            )
        return _of_files(name, files or there, split, is_directory=not is_file and not is_pattern)
    name = name.removeprefix("file://")
    path = Path(name).expanduser()
    parent, colon, inside = name.rpartition(":")
    if colon and not path.exists() and parent:
        if Path(parent).expanduser().is_dir():
            return resolve(f"{parent}/{inside}", split=split, subset=subset, revision=revision)
        if "/" in parent and not is_pattern:
            return Source(name, subset=subset, revision=revision, split=split, data_dir=inside)
    if path.is_file():
        return _of_files(name, [str(path)], split)
    if path.is_dir():
        if subset is not None or is_datasets_directory(path):
            return Source(name, subset=subset, split=split)
        files = _files_in(path)
        _require_targets(file for file in files if file_suffix(file) in ("", *_READABLE))
        files = [file for file in files if Path(file).is_file()]
        return _of_files(name, sorted(files, key=lambda file: file.split("/")), split, is_directory=True)
    if is_pattern:
        matches = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        _require_targets(map(str, matches))
        files = sorted(str(item) for item in matches if item.is_file())
        if files:
            return _of_files(name, files, split)
        raise DataError("the pattern matches no file", where=name, repair=_NOT_THERE)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or file_suffix(name) in (*TABLES, ".txt", ".md"):
        raise DataError(f"the file does not exist{did_you_mean_path(name)}", where=name, repair=_NOT_THERE)
    return Source(name, subset=subset, revision=revision, split=split)


def unread(sources: Iterable[Source]) -> list[str]:
    """For each directory or URL, a line about the files in it that none of these sources reads, and why not."""
    read: dict[str, set[str]] = {}
    for source in sources:
        if source.is_files:
            read.setdefault(source.name, set()).update(source.files)
    lines = []
    for name, files in read.items():
        path, left = Path(name).expanduser(), dict[str, list[str]]()
        for file in find(name) if is_url(name) else _files_in(path) if path.is_dir() else ():
            if file not in files:
                suffix = file_suffix(file)
                why = "of other splits" if suffix in TABLES else "text" if suffix in TEXTS else "of other types"
                left.setdefault(why, []).append(file.rpartition("/")[2])
        parts = [f"{len(named):,} {why} ({listed(sorted(named))})" for why, named in left.items()]
        if parts:
            lines.append(f"{name}: files that are not read: {'; '.join(sorted(parts))}")
    return lines


def listed(names: Iterable[str]) -> str:
    """Names of files in a message: the first of them."""
    return cut(", ".join(names), _NAMES)


def held_out_by_name(source: Source) -> list[str]:
    """Files of a source with the name of a split to hold out, such as ``my_test.jsonl``, beside others without."""
    depth, train = _shared_depth(source.files), _SAME_SPLIT[0]
    names = []
    for file in source.files if len(source.files) > 1 else ():
        words = {word for part in PurePosixPath(file).parts[depth:] for word in re.split(r"[-_. ]", part.lower())}
        if words & set(SPLITS) and not words & set(train):
            names.append(file)
    return names if len(names) < len(source.files) else []


def _files_in(folder: Path) -> list[str]:
    return [file.removeprefix("./") for file in _below(str(folder), set())]


def _below(folder: str, seen: set[str]) -> Iterator[str]:
    """Files in a folder and its subfolders, without hidden ones; links are followed, and no folder is read twice."""
    if (here := os.path.realpath(folder)) in seen:
        return
    seen.add(here)
    with storage_errors(folder), os.scandir(folder) as entries:
        # A folder itself before links to it; and an order that does not depend on the disk's.
        for entry in sorted(entries, key=lambda item: (item.is_symlink(), item.name)):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _below(entry.path, seen)
            else:
                yield entry.path


def _require_targets(files: Iterable[str]) -> None:
    """Refuse a symbolic link to nothing: its rows would be missing without a word."""
    if lost := [file for file in files if Path(file).is_symlink() and not Path(file).exists()]:
        raise DataError("the symbolic link is broken", where=min(lost), repair="fix or remove it")


def split_name(split: str, *, where: str = "data.train_split") -> tuple[str, Slice | None]:
    """The name and the slice of a split such as ``train[:1%]``. Raises DataError: the syntax is wrong."""
    match = _SLICE.match(split)
    if match is None:
        raise DataError(
            f"`{split}` is not a split of a file",
            where=where,
            repair="write a split name, with an optional slice: train[:10%]",
        )
    if match["start"] is None:
        return split, None
    if any(end.endswith("%") and not -100 <= int(end[:-1]) <= 100 for end in (match["start"], match["stop"]) if end):
        raise DataError(f"`{split}` asks for more than 100%", where=where, repair="write 100% at most")
    if len({end.endswith("%") for end in (match["start"], match["stop"]) if end}) > 1:
        raise DataError(
            f"`{split}` mixes rows and percent",
            where=where,
            repair="write both ends in rows, or both in percent",
        )
    return match["name"], Slice(match["start"], match["stop"])


def is_saved(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk`` of ``datasets``."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def is_datasets_directory(path: Path) -> bool:
    """Whether a directory was written by ``datasets``, or has the layout of a Hub dataset."""
    readme = path / "README.md"
    return is_saved(path) or (
        readme.is_file() and readme.read_text(encoding="utf-8", errors="replace").startswith("---")
    )


def _of_files(name: str, files: list[str], split: str, *, is_directory: bool = False) -> Source:
    """A source of the given files, or of those in a directory that belong to the split."""
    tables = [file for file in files if file_suffix(file) in TABLES]
    texts = [file for file in files if file_suffix(file) in TEXTS]
    if is_directory and not tables and not texts:
        raise DataError(
            "the directory holds no data files", where=name, repair=f"files must end in {', '.join(TABLES)}, or be text"
        )
    if not is_directory and len(tables) + len(texts) < len(files):
        file = next(file for file in files if file_suffix(file) not in _READABLE)
        suffix = PurePosixPath(file).suffix
        raise DataError(
            f"files of type `{suffix}` are not supported" if suffix else "files without a suffix are not supported",
            where=file,
            repair=f"use one of {', '.join(TABLES)}, text or source files, or these with {', '.join(COMPRESSION)}",
        )
    wanted, rows = split_name(split)
    if is_directory:
        files = _of_split(tables, wanted) if tables else texts
    return Source(name, tuple(files), split=split, slice=rows)


def _of_split(files: list[str], split: str) -> list[str]:
    """The files of a directory that belong to a split: by their own names, or by the names of their folders."""
    words = {*SPLITS, split}
    depth = _shared_depth(files)
    labels = {}

    @cache
    def of_folder(parent: str) -> str | None:
        """The nearest folder whose name indicates a split."""
        return next((folder for folder in reversed(PurePosixPath(parent).parts[depth:]) if folder in words), None)

    for file in files:
        parent, _, base = file.rpartition("/")
        label = base.split(".")[0]
        labels[file] = label if _first_word(label) in words else of_folder(parent) or label
    alike = next((names for names in _SAME_SPLIT if split in names), (split,))
    for name in (split, *alike):
        named = [file for file in files if re.match(rf"{re.escape(name)}([-_]|$)", labels[file])]
        if named:
            return named
    rest = [file for file in files if _first_word(labels[file]) not in SPLITS]
    if len(rest) < len(files) and (split != "train" or not rest):
        names = ", ".join(PurePosixPath(file).name for file in files[:8])
        raise DataError(
            f"there is no file for the split `{split}`",
            where=str(PurePosixPath(files[0]).parent),
            repair=f"there are: {names}",
        )
    return rest


def _first_word(label: str) -> str:
    return re.split(r"[-_.]", label)[0]
