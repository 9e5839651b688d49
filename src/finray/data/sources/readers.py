"""Rows of one file, or of a range of it, by file type.

A row that cannot be read is yielded as a :class:`BadRow`, so that the caller decides; a file that cannot be read at all
is an error.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal

from finray.data.sources.json_window import CHUNK, GrowingText, why_no_json
from finray.data.sources.resolve import TEXTS
from finray.data.storage import file_suffix, open_binary
from finray.errors import DataError

_BOM = b"\xef\xbb\xbf"

Kind = Literal["lines", "array", "csv", "tsv", "parquet", "arrow", "text", "datasets"]
TextRows = Literal["file", "paragraph", "line"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read.

    Attributes:
        max_row_bytes: a row of JSON or CSV that is larger is a bad row.
        text_rows: what a row of a text file is.
    """

    max_row_bytes: int = 8_000_000
    text_rows: TextRows = "file"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read: ``number`` as in :class:`Row`, relative to the piece."""

    number: int
    message: str
    repair: str | None = None


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of a file.

    Attributes:
        file: path, URL or data set name.
        kind: how it is read.
        start: first byte, row group, record batch or row.
        stop: the one after the last; None for the end of the file.
        first: rows of the file before the piece; None where only counting can tell.
        keep: rows of the piece that belong to a slice, as a range; None for all.
    """

    file: str
    kind: Kind
    start: int = 0
    stop: int | None = None
    first: int | None = 0
    keep: tuple[int, int] | None = None


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    """A file for reading; whatever goes wrong while it is read is the file's fault.

    Raises:
        DataError: it cannot be opened, or is damaged or cut off.
    """
    import pyarrow as pa

    with open_binary(file) as stream:
        try:
            yield stream
        except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise DataError(
                f"the file is damaged or cut off: {_first_line(error)}", where=file, repair="write or fetch it again"
            ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# Number of a row within its piece, from 1, and the row; None for a blank one.
Numbered = Iterator[tuple[int, dict[str, Any] | BadRow | None]]


def kind_of(file: str) -> Kind:
    """How a file is read: by its suffix, and a `.json` file by its first character."""
    suffix = file_suffix(file)
    if suffix in TEXTS:
        return "text"
    if suffix == ".json" and _starts_with_array(file):
        return "array"
    kinds: dict[str, Kind] = {
        ".csv": "csv",
        ".tsv": "tsv",
        ".parquet": "parquet",
        ".arrow": "arrow",
        ".feather": "arrow",
    }
    return kinds.get(suffix, "lines")


def raw_lines(piece: ByteRange, reading: Reading) -> Iterator[tuple[int, bytes | None]]:
    """Lines that begin in the piece, numbered from 1; None for one that is too long to be read."""
    # Line ends and a byte order mark do not count.
    most = reading.max_row_bytes + len(_BOM) + 2
    with _opened(piece.file) as stream:
        position = number = 0
        if piece.start:
            # The line that began before belongs to the piece before.
            stream.seek(piece.start - 1)
            position = (
                piece.start - 1 + _skip_line(stream, None if piece.stop is None else piece.stop - piece.start + 1)
            )
        while piece.stop is None or position < piece.stop:
            line = stream.readline(most + 1)
            if not line:
                return
            number += 1
            position += len(line)
            whole = line.endswith(b"\n") or len(line) <= most
            if number == 1 and not piece.start:
                line = line.removeprefix(_BOM)
            if not whole or len(line.rstrip(b"\r\n")) > reading.max_row_bytes:
                if not whole:
                    position += _skip_line(stream)
                yield number, None
            else:
                yield number, line


def _skip_line(stream: IO[bytes], most: int | None = None) -> int:
    skipped = 0
    while line := stream.readline(CHUNK if most is None else min(CHUNK, most - skipped)):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def read_lines(piece: ByteRange, reading: Reading) -> Numbered:
    """Rows of JSON lines that begin in the piece."""
    for number, line in raw_lines(piece, reading):
        if line is None:
            yield number, _too_long(number, reading)
            continue
        yield number, _parse_line(number, line) if line.strip() else None


_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_CLEAN = "write the row again from clean text"
_JOINED = "remove it (files were joined without removing it)"


def _not_utf8(number: int, at: int | None = None) -> BadRow:
    place = "" if at is None else f" at byte {at}"
    return BadRow(number, f"the row is not UTF-8{place}", "save the file as UTF-8")


def _too_long(number: int, reading: Reading) -> BadRow:
    return BadRow(
        number,
        f"the row is longer than {reading.max_row_bytes:,} bytes",
        "cut it into smaller rows, or raise prepare.max_row_bytes",
    )


def _parse_line(number: int, line: bytes) -> dict[str, Any] | BadRow:
    if line.startswith(_BOM):
        return BadRow(number, "the row begins with a byte order mark", _JOINED)
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(number, error.start)
    except (ValueError, RecursionError) as error:
        column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        cut_off = "" if line.endswith(b"\n") else ", and the file ends there"
        return BadRow(
            number,
            f"the row is not JSON: {why_no_json(error)}{column}{cut_off}",
            "mend or remove the row; each line must be one JSON object",
        )
    return _checked(number, value, line)


def _checked(number: int, value: Any, written: bytes) -> dict[str, Any] | BadRow:
    if not isinstance(value, dict):
        return BadRow(number, f"the row is a {type(value).__name__}, not an object with columns")
    if _SURROGATES.search(written):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return BadRow(number, "the row holds half of a surrogate pair, which is no character", _CLEAN)
    return value


def _starts_with_array(file: str) -> bool:
    with _opened(file) as stream:
        return stream.read(4096).removeprefix(_BOM).lstrip()[:1] == b"["


def read_array(piece: ByteRange, reading: Reading) -> Numbered:
    """Objects of one JSON array, without holding the whole of it."""
    with _opened(piece.file) as stream:
        text = GrowingText(stream)
        text.skip("\ufeff \t\r\n")
        text.drop()
        number = 0
        while text.skip(" \t\r\n,") and text.head() != "]":
            number += 1
            yield number, _array_row(text, number, piece.file, reading)
        if not text.head():
            raise DataError(
                "the file ends before its array does",
                where=f"{piece.file}:{number + 1}",
                repair="write the file again; it was cut off",
            )
        text.drop()
        if text.skip(" \t\r\n"):
            raise DataError(
                "something follows the array",
                where=f"{piece.file}:{number + 1}",
                repair="a .json file holds one array; name files of one object a line .jsonl",
            )


def _array_row(text: GrowingText, number: int, file: str, reading: Reading) -> dict[str, Any] | BadRow:
    found = text.take(number, file, reading.max_row_bytes)
    if found is None:
        return _too_long(number, reading)
    value, raw = found
    try:
        written = raw.encode("utf-8")
    except UnicodeEncodeError as error:
        return _not_utf8(number, len(raw[: error.start].encode("utf-8", errors="surrogateescape")))
    return _too_long(number, reading) if len(written) > reading.max_row_bytes else _checked(number, value, written)


def read_csv(piece: ByteRange, reading: Reading) -> Numbered:
    """Rows of comma- or tab-separated values, under the header of the file."""
    csv.field_size_limit(2**31 - 1)
    with _opened(piece.file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, delimiter="\t" if piece.kind == "tsv" else ",", strict=True)
        columns = _header(reader, piece.file)
        number = 0
        while True:
            number += 1
            try:
                value = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, BadRow(number, f"the row is not CSV: {error}", "quote the value, and double quotes in it")
            else:
                yield number, _checked_csv(number, value, columns, reading)


def _header(reader: csv.DictReader[str], file: str) -> int:
    """How many columns there are."""
    try:
        names = list(reader.fieldnames or [])
        "".join(names).encode("utf-8")
    except csv.Error as error:
        raise DataError(f"the header is not CSV: {error}", where=file, repair="mend the first line") from None
    except UnicodeEncodeError:
        raise DataError("the header is not UTF-8", where=file, repair="save the file as UTF-8") from None
    return len(names)


def _checked_csv(number: int, value: dict[Any, Any], columns: int, reading: Reading) -> dict[str, Any] | BadRow:
    if None in value or None in value.values():
        return BadRow(number, f"the row has another number of columns than the header ({columns})")
    text = "".join(value.values())
    try:
        length = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return _not_utf8(number)
    if length > reading.max_row_bytes:
        return _too_long(number, reading)
    if text.startswith("\ufeff"):
        return BadRow(number, "the row begins with a byte order mark", _JOINED)
    # Line ends within quotes are those of the file, not of the text.
    return {name: one.replace("\r\n", "\n") for name, one in value.items()} if "\r\n" in text else value


def parquet_file(file: str) -> Any:
    """An open Parquet file.

    Raises:
        DataError: it is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(open_binary(file))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"not a Parquet file: {_first_line(error)}", where=file) from None


def read_parquet(piece: ByteRange) -> Numbered:
    """Rows of some row groups."""
    import pyarrow.parquet as pq

    with _opened(piece.file) as stream, pq.ParquetFile(stream) as table:
        groups = list(range(piece.start, table.num_row_groups if piece.stop is None else piece.stop))
        yield from _table_rows(table.iter_batches(batch_size=1024, row_groups=groups))


def read_arrow(piece: ByteRange) -> Numbered:
    """Rows of an Arrow file or stream."""
    import pyarrow as pa

    with _opened(piece.file) as stream:
        try:
            reader: Any = pa.ipc.open_file(stream)
            batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            stream.seek(0)
            try:
                batches = pa.ipc.open_stream(stream)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"not an Arrow file: {_first_line(error)}", where=piece.file) from None
        yield from _table_rows(batches)


def _table_rows(batches: Iterable[Any]) -> Numbered:
    number = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        except UnicodeDecodeError:
            values = [_table_row(batch, at, number + at + 1) for at in range(len(batch))]
        for value in values:
            number += 1
            yield number, value


def _table_row(batch: Any, at: int, number: int) -> dict[str, Any] | BadRow:
    try:
        value: dict[str, Any] = batch.slice(at, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return BadRow(number, "the row is not UTF-8", _CLEAN)
    return value


def read_text(piece: ByteRange, reading: Reading, *, name: str) -> Numbered:
    """Rows `text` and `path` of a text file; empty ones are left out."""
    with _opened(piece.file) as stream:
        content = stream.read().removeprefix(_BOM).replace(b"\r\n", b"\n")
    for number, part in enumerate(_text_rows(content, reading.text_rows), start=1):
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError as error:
            yield number, _not_utf8(number, error.start)
            continue
        yield number, {"text": text, "path": name} if text.strip() else None


def _text_rows(content: bytes, unit: TextRows) -> list[bytes]:
    if unit == "file":
        return [content]
    return re.split(rb"\n(?:[ \t]*\n)+", content.strip(b"\n")) if unit == "paragraph" else content.split(b"\n")
