"""Rows of one file, or of a range of it, by file type.

A row that cannot be read is yielded as a :class:`BadRow`, so that the caller decides; a file that cannot be read at all
is an error.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from finray.data.sources import TEXTS
from finray.data.storage import file_suffix, open_binary
from finray.errors import DataError

_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"

Kind = Literal["lines", "array", "csv", "tsv", "parquet", "arrow", "text", "datasets"]
TextRows = Literal["file", "paragraph", "line"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read.

    Attributes:
        max_row_bytes: a row of JSON lines that is larger is a bad row.
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
class Piece:
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


def raw_lines(piece: Piece, reading: Reading) -> Iterator[tuple[int, bytes | None]]:
    """Lines that begin in the piece, numbered from 1; None for one that is too long to be read."""
    with open_binary(piece.file) as stream:
        position = number = 0
        if piece.start:
            # The line that began before belongs to the piece before.
            stream.seek(piece.start - 1)
            position = piece.start - 1 + _skip_line(stream)
        while piece.stop is None or position < piece.stop:
            line = stream.readline(reading.max_row_bytes + 1)
            if not line:
                return
            number += 1
            position += len(line)
            if len(line) > reading.max_row_bytes:
                if not line.endswith(b"\n"):
                    position += _skip_line(stream)
                yield number, None
            else:
                yield number, line


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while line := stream.readline(_CHUNK):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def read_lines(piece: Piece, reading: Reading) -> Numbered:
    """Rows of JSON lines that begin in the piece."""
    for number, line in raw_lines(piece, reading):
        if line is None:
            yield number, _too_long(number, reading)
            continue
        if number == 1 and piece.start == 0:
            line = line.removeprefix(_BOM)
        yield number, _parse_line(number, line) if line.strip() else None


def _too_long(number: int, reading: Reading) -> BadRow:
    return BadRow(
        number,
        f"the row is longer than {reading.max_row_bytes:,} bytes",
        "cut it into smaller rows, or raise prepare.max_row_bytes",
    )


def _parse_line(number: int, line: bytes) -> dict[str, Any] | BadRow:
    if line.startswith(_BOM):
        return BadRow(
            number, "the row begins with a byte order mark", "remove it (files were joined without removing it)"
        )
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(number, f"the row is not UTF-8 at byte {error.start}", "save the file as UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        reason = (
            f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        )
        cut_off = "" if line.endswith(b"\n") else ", and the file ends there"
        return BadRow(
            number,
            f"the row is not JSON: {reason}{cut_off}",
            "mend or remove the row; each line must be one JSON object",
        )
    return _checked(number, value)


def _checked(number: int, value: Any) -> dict[str, Any] | BadRow:
    if not isinstance(value, dict):
        return BadRow(number, f"the row is a {type(value).__name__}, not an object with columns")
    return value


def _starts_with_array(file: str) -> bool:
    with open_binary(file) as stream:
        return stream.read(4096).removeprefix(_BOM).lstrip()[:1] == b"["


def read_array(piece: Piece, reading: Reading) -> Numbered:
    """Objects of one JSON array, without holding the whole of it."""
    decoder = json.JSONDecoder()
    with open_binary(piece.file) as stream:
        text = _Growing(stream)
        text.skip("\ufeff \t\r\n[")
        number = 0
        while text.skip(" \t\r\n,") and text.head() != "]":
            number += 1
            value, raw = text.take(decoder, number, piece.file, reading.max_row_bytes)
            try:
                raw.encode("utf-8")
            except UnicodeEncodeError as error:
                yield (
                    number,
                    BadRow(number, f"the row is not UTF-8 at character {error.start}", "save the file as UTF-8"),
                )
            else:
                yield number, _checked(number, value)
        if not text.head():
            raise DataError(
                "the file ends before its array does",
                where=f"{piece.file}:{number + 1}",
                repair="write the file again; it was cut off",
            )


class _Growing:
    """A window of text over a stream. Bytes that are not UTF-8 come through as lone surrogates."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        self._text = ""
        self._at = 0

    def _grow(self) -> bool:
        chunk = self._stream.read(_CHUNK)
        self._text = self._text[self._at :] + self._decode(chunk, final=not chunk)
        self._at = 0
        return bool(chunk)

    def head(self) -> str:
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> bool:
        """Pass over characters; False at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in characters:
                self._at += 1
            if self._at < len(self._text):
                return True
            if not self._grow():
                return False

    def take(self, decoder: json.JSONDecoder, number: int, file: str, limit: int) -> tuple[Any, str]:
        """The next value, and its text."""
        while True:
            try:
                value, stop = decoder.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if len(self._text) - self._at <= max(limit, _CHUNK) and self._grow():
                    continue
                raise DataError(
                    f"the row is not JSON: {getattr(error, 'msg', 'nested too deeply')}",
                    where=f"{file}:{number}",
                    repair="mend the file; the rows after this one cannot be found",
                ) from None
            raw = self._text[self._at : stop]
            self._at = stop
            return value, raw


def read_csv(piece: Piece, reading: Reading) -> Numbered:
    """Rows of comma- or tab-separated values, under the header of the file."""
    csv.field_size_limit(2**31 - 1)
    with open_binary(piece.file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, delimiter="\t" if piece.kind == "tsv" else ",")
        try:
            for number, value in enumerate(reader, start=1):
                yield number, _checked_csv(number, value, len(reader.fieldnames or []), reading)
        except csv.Error as error:
            raise DataError(f"not valid CSV: {error}", where=f"{piece.file}:{reader.line_num}") from None


def _checked_csv(number: int, value: dict[Any, Any], columns: int, reading: Reading) -> dict[str, Any] | BadRow:
    if None in value or None in value.values():
        return BadRow(number, f"the row has another number of columns than the header ({columns})")
    text = "".join(value.values())
    try:
        length = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return BadRow(number, "the row is not UTF-8", "save the file as UTF-8")
    return _too_long(number, reading) if length > reading.max_row_bytes else value


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
        raise DataError(f"not a Parquet file: {str(error).splitlines()[0]}", where=file) from None


def read_parquet(piece: Piece) -> Numbered:
    """Rows of some row groups."""
    with parquet_file(piece.file) as table:
        groups = list(range(piece.start, table.num_row_groups if piece.stop is None else piece.stop))
        batches = table.iter_batches(batch_size=1024, row_groups=groups)
        yield from _table_rows(batches, piece.file)


def read_arrow(piece: Piece) -> Numbered:
    """Rows of an Arrow file or stream."""
    import pyarrow as pa

    with open_binary(piece.file) as stream:
        try:
            try:
                reader: Any = pa.ipc.open_file(stream)
                batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
            except pa.ArrowInvalid:
                stream.seek(0)
                batches = pa.ipc.open_stream(stream)
            yield from _table_rows(batches, piece.file)
        except pa.ArrowInvalid as error:
            raise DataError(f"not an Arrow file: {str(error).splitlines()[0]}", where=piece.file) from None


def _table_rows(batches: Iterable[Any], file: str) -> Numbered:
    number = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        except UnicodeDecodeError:
            raise DataError(
                "a text column is not UTF-8",
                where=f"{file}:{number + 1}",
                repair="write the file again from clean text",
            ) from None
        for value in values:
            number += 1
            yield number, value


def read_text(piece: Piece, reading: Reading, *, name: str) -> Numbered:
    """Rows `text` and `path` of a text file; empty ones are left out."""
    with open_binary(piece.file) as stream:
        content = stream.read()
    try:
        text = content.removeprefix(_BOM).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        yield 1, BadRow(1, f"the file is not UTF-8 at byte {error.start}", "save the file as UTF-8")
        return
    for number, part in enumerate(_text_rows(text, reading.text_rows), start=1):
        yield number, {"text": part, "path": name} if part.strip() else None


def _text_rows(text: str, unit: TextRows) -> list[str]:
    if unit == "file":
        return [text]
    return text.split("\n\n") if unit == "paragraph" else text.split("\n")
