"""Source rows, one dictionary each, with the file and row they came from.

Local files are read here, and not through ``datasets``, because a mistake in a file must be named by file and row;
Hugging Face data sets (by name, or directories that ``datasets`` wrote) go through ``datasets``.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
# First words of file names that speak of a split.
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "eval", "test")
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Row:
    """One source row.

    Attributes:
        file: where it was read, a path or a data set name.
        number: row number within the file, from 1.
        value: column name to value.
    """

    file: str
    number: int
    value: dict[str, Any]

    @property
    def where(self) -> str:
        """``file:row``, for messages."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved source: local files, a directory written by ``datasets``, or a Hugging Face name."""

    name: str
    files: tuple[Path, ...] = ()
    subset: str | None = None
    revision: str | None = None
    split: str = "train"

    @property
    def is_local(self) -> bool:
        """Whether the rows come from local files that finray reads itself."""
        return bool(self.files)


def resolve(name: str, *, split: str, subset: str | None = None, revision: str | None = None) -> Source:
    """Decide what a source name means.

    A path that exists is read from disk; so is a glob. Files in a directory whose names start with the wanted split
    (``train.jsonl``, ``validation-00000.parquet``) are that split; without such names every file belongs to it.

    Raises:
        DataError: nothing is there, or nothing that can be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        _check_suffix(path)
        return Source(name, (path,))
    if path.is_dir():
        if subset is not None or _is_datasets_directory(path):
            return Source(name, subset=subset, revision=revision, split=split)
        files = sorted(item for item in path.rglob("*") if item.is_file() and item.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(
                "the directory holds no data files", where=name, repair=f"files must end in {', '.join(SUFFIXES)}"
            )
        return Source(name, tuple(_of_split(files, split)), split=split)
    if _GLOB_CHARACTERS & set(name):
        files = sorted(item for item in _glob(name) if item.is_file())
        if not files:
            raise DataError(
                "the pattern matches no file", where=name, repair="check data.source and the working directory"
            )
        for item in files:
            _check_suffix(item)
        return Source(name, tuple(files))
    if path.is_absolute() or name.startswith(("./", "../", "~")) or path.suffix.lower() in SUFFIXES:
        raise DataError("the file does not exist", where=name, repair="check data.source and the working directory")
    return Source(name, subset=subset, revision=revision, split=split)


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    anchor = Path(path.anchor) if path.is_absolute() else Path()
    return anchor.glob(str(path.relative_to(path.anchor)) if path.is_absolute() else str(path))


def read(source: Source) -> Iterator[Row]:
    """All rows of a source, in a fixed order.

    Raises:
        DataError: a file or row cannot be read; the message names both.
    """
    if source.is_local:
        for file in source.files:
            yield from read_file(file)
    else:
        yield from _read_datasets(source)


def read_file(path: Path) -> Iterator[Row]:
    """Rows of one local file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        yield from _read_csv(path)
    elif suffix == ".parquet":
        yield from _read_parquet(path)
    elif suffix == ".json" and _starts_with_array(path):
        yield from _read_json_array(path)
    else:
        yield from _read_json_lines(path)


def content_digest(source: Source) -> str:
    """A digest that changes when the rows do: of the bytes of local files, of the fingerprint ``datasets`` keeps."""
    digest = hashlib.sha256()
    if source.is_local:
        for file in source.files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    else:
        dataset = _load_datasets(source)
        identity = [source.subset, source.revision, source.split, dataset._fingerprint, len(dataset)]
        digest.update(json.dumps(identity).encode())
    return digest.hexdigest()


def _check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"files of type `{path.suffix}` are not read", where=str(path), repair=f"use one of {', '.join(SUFFIXES)}"
        )


def _of_split(files: list[Path], split: str) -> list[Path]:
    named = [
        file for file in files if file.stem == split or file.stem.startswith((f"{split}-", f"{split}_", f"{split}."))
    ]
    of_another = {file for file in files if re.split(r"[-_.]", file.stem)[0] in SPLITS}
    rest = [file for file in files if file not in of_another]
    if not named and of_another and (split != "train" or not rest):
        raise DataError(
            f"no file of the split `{split}`",
            where=str(files[0].parent),
            repair=f"there are: {', '.join(file.name for file in files[:8])}",
        )
    return named or rest or files


def _is_datasets_directory(path: Path) -> bool:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return True
    readme = path / "README.md"
    return readme.is_file() and readme.read_text(encoding="utf-8", errors="replace").startswith("---")


def _load_datasets(source: Source) -> Any:
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.name).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, datasets.DatasetDict):
                if source.split not in loaded:
                    raise DataError(
                        f"no split is called `{source.split}`",
                        where=source.name,
                        repair=f"there are: {', '.join(loaded)}",
                    )
                loaded = loaded[source.split]
        else:
            name = str(path) if path.is_dir() else source.name
            loaded = datasets.load_dataset(name, source.subset, split=source.split, revision=source.revision)
    except DataError:
        raise
    except Exception as error:
        # `datasets` raises a dozen unrelated types here (missing split, no network, gated, unknown configuration).
        raise DataError(
            f"the data set cannot be loaded: {_first_line(error)}",
            where=source.name,
            repair="check data.source (no such file or directory exists here either), data.subset and the split names",
        ) from None
    return loaded


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _read_datasets(source: Source) -> Iterator[Row]:
    for number, value in enumerate(_load_datasets(source), start=1):
        yield Row(source.name, number, value)


def _starts_with_array(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_json_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start}", where=str(path)) from None
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error.msg}", where=f"{path}:{error.lineno}") from None
    for number, value in enumerate(rows, start=1):
        yield _checked(path, number, value)


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"the row is not UTF-8 at byte {error.start}", where=f"{path}:{number}") from None
            except json.JSONDecodeError as error:
                raise DataError(
                    f"the row is not JSON: {error.msg} (column {error.colno})",
                    where=f"{path}:{number}",
                    repair="mend or remove the row; each line must be one JSON object",
                ) from None
            yield _checked(path, number, value)


def _checked(path: Path, number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"the row is a {type(value).__name__}, not an object with columns", where=f"{path}:{number}")
    return Row(str(path), number, value)


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            for number, value in enumerate(reader, start=1):
                if None in value or None in value.values():
                    raise DataError(
                        f"the row has another number of columns than the header ({len(reader.fieldnames or [])})",
                        where=f"{path}:{number}",
                    )
                yield Row(str(path), number, dict(value))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start}", where=str(path)) from None
    except csv.Error as error:
        raise DataError(f"not valid CSV: {error}", where=str(path)) from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, value)
    except pa.ArrowInvalid as error:
        raise DataError(f"not a Parquet file: {_first_line(error)}", where=str(path)) from None
