"""Readers for the rows of a file, or of a range of it, by file type.

A reader yields one value per row, in order: the columns; None for a blank row; or a :class:`DataError` without a
location for a bad row, so that the caller decides. A file that cannot be read at all is an error.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, Literal

from finray.data.sources.resolve import TEXTS
from finray.data.storage import file_suffix, opened
from finray.errors import DataError
from finray.files import first_line
from finray.limits import cut

Kind = Literal["lines", "array", "csv", "tsv", "parquet", "arrow", "text", "datasets"]
TextRows = Literal["file", "paragraph", "line"]
Value = dict[str, Any] | DataError

CHUNK = 2**20
# Minimum length of the text window in which the end of a row of a JSON array is searched.
_WINDOW = 2**26
_BOM = b"\xef\xbb\xbf"
_BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")
# Of a CSV file, so many lines show whether values follow a space.
_MOST_LINES = 100
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_CLEAN = "write the row again from clean text"
_KINDS: dict[str, Kind] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of the readers."""

    max_row_bytes: int = 8_000_000  # a larger row of JSON or CSV is a bad row
    text_rows: TextRows = "file"  # what counts as a row of a text file


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of a file."""

    file: str  # path, URL or dataset name
    kind: Kind  # file type
    start: int = 0  # first byte, row group or row
    stop: int | None = None  # the first one after the range; None for the end of the file
    first: int | None = 0  # rows of the file before the piece; None if they must be counted
    keep: tuple[int, int] | None = None  # rows of the piece that belong to a slice, as a range; None for all


def kind_of(file: str) -> Kind:
    """The type of a file: by its suffix; for `.json` by its first character."""
    suffix = file_suffix(file)
    if suffix in TEXTS:
        return "text"
    if suffix == ".json":
        with opened(file) as stream:
            return "array" if stream.read(4096).removeprefix(_BOM).lstrip()[:1] == b"[" else "lines"
    return _KINDS.get(suffix, "lines")


# --- JSON -----------------------------------------------------------------------------------------------------------


class RepeatedKey(ValueError):
    """An object has a key twice, of which Python would keep the last one."""

    def __init__(self, key: str) -> None:
        super().__init__(f"an object has the key `{cut(key, 60)}` twice")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise RepeatedKey(next(key for key, count in keys.items() if count > 1))
    return content


# Created once: `json.loads` with a hook creates one for each row, which takes as long as parsing it.
_JSON = json.JSONDecoder(object_pairs_hook=_object)
_ANY_JSON = json.JSONDecoder()


def parse_json(text: str) -> Any:
    """A JSON value.
    Raises ValueError: it is not valid; a :class:`RepeatedKey` if a key occurs twice; RecursionError: it is nested
    too deeply."""
    return _JSON.decode(text)


def raw_lines(piece: ByteRange, reading: Reading) -> Iterator[bytes | None]:
    """Lines that begin in the piece; None for one that is too long."""
    # Line ends and a byte order mark are not part of the limit.
    most = reading.max_row_bytes + len(_BOM) + 3
    with opened(piece.file) as stream:
        position = 0
        if piece.start:
            # A line that began earlier belongs to the previous piece.
            stream.seek(piece.start - 1)
            reach = None if piece.stop is None else piece.stop - piece.start + 1
            position = piece.start - 1 + _skip_line(stream, reach)
        at_start = not piece.start
        while piece.stop is None or position < piece.stop:
            line = stream.readline(most)
            if not line:
                return
            position += len(line)
            cut = len(line) == most and not line.endswith(b"\n")
            if cut:
                position += _skip_line(stream)
            if at_start:
                line, at_start = line.removeprefix(_BOM), False
            yield None if cut or len(line.rstrip(b"\r\n")) > reading.max_row_bytes else line


def _skip_line(stream: IO[bytes], most: int | None = None) -> int:
    skipped = 0
    while line := stream.readline(CHUNK if most is None else min(CHUNK, most - skipped)):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def read_lines(piece: ByteRange, reading: Reading) -> Iterator[Value | None]:
    """Rows of JSON lines that begin in the piece."""
    for line in raw_lines(piece, reading):
        if line is None:
            yield _too_long(reading)
        elif not line.strip():
            yield None
        elif line.startswith(_BOM):
            yield _byte_order_mark()
        else:
            try:
                value = parse_json(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield _not_utf8(error.start)
            except RepeatedKey as error:
                yield _repeated(error)
            except (ValueError, RecursionError) as error:
                column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
                cut_off = "" if line.endswith(b"\n") else ", and the file ends there"
                yield DataError(
                    f"the row is not JSON: {_why_no_json(error)}{column}{cut_off}",
                    repair="write each object on one line, or all of them as one array in a .json file"
                    if line.strip() in (b"[", b"{")
                    else "fix or remove the row; each line must be one JSON object",
                )
            else:
                yield _checked(value, line)


def read_array(piece: ByteRange, reading: Reading) -> Iterator[Value | None]:
    """Objects of one JSON array, read through a window of text that holds a row.

    We do not use ijson: it stops at the first byte that is not UTF-8, turns half of a surrogate pair into `?`, and runs
    out of memory on 100 KB of opening brackets.
    """
    most = max(2 * reading.max_row_bytes, _WINDOW)
    with opened(piece.file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        while text.read(1) not in ("[", ""):
            pass
        window, at, number, commas = "", 0, 1, 0
        while True:
            stop = _BETWEEN_ROWS.match(window, at).end()  # type: ignore[union-attr]
            commas += window.count(",", at, stop)
            at = stop
            if at < len(window) and (commas > 1 or (commas == (number == 1) and not window.startswith("]", at))):
                raise DataError(
                    "a row is missing between two commas" if commas else "there is no comma before the row",
                    where=f"{piece.file}:{number}",
                    repair="fix the file: rows of an array are separated by one comma",
                )
            if window.startswith("]", at):
                break
            problem: Exception | None = None
            try:
                try:
                    value, stop = _JSON.raw_decode(window, at)
                except RepeatedKey as error:
                    # The row ends where it would without that.
                    value, stop = _repeated(error), _ANY_JSON.raw_decode(window, at)[1]
                is_cut = stop == len(window)
            except json.JSONDecodeError as error:
                problem, is_cut = error, error.pos + 16 > len(window) or error.msg.startswith("Unterminated string")
            except (ValueError, RecursionError) as error:
                problem, is_cut = error, False
            # The value may continue beyond the window.
            held = len(window) - at
            if is_cut and held <= most and (more := text.read(max(CHUNK, held))):
                window, at = window[at:] + more, 0
                continue
            if problem is not None:
                too_long = is_cut and held > most
                raise _unreadable_array(problem, held, too_long=too_long, where=f"{piece.file}:{number}")
            yield _array_row(value, window[at:stop], reading)
            at, number, commas = stop, number + 1, 0
        if any(rest.strip(" \t\r\n") for rest in (window[at + 1 :], *iter(lambda: text.read(CHUNK), ""))):
            raise DataError(
                "there is text after the array",
                where=f"{piece.file}:{number}",
                repair="a .json file holds one array; use the suffix .jsonl for one object per line",
            )


def _array_row(value: Any, raw: str, reading: Reading) -> Value:
    try:
        written = raw.encode("utf-8")
    except UnicodeEncodeError as error:
        return _not_utf8(len(raw[: error.start].encode("utf-8", errors="surrogateescape")))
    return _too_long(reading) if len(written) > reading.max_row_bytes else _checked(value, written)


def _unreadable_array(problem: Exception, held: int, *, too_long: bool, where: str) -> DataError:
    if not held:
        return DataError("the file ends inside its array", where=where, repair="write the file again: it is cut off")
    if too_long:
        return DataError(
            f"the row has more than {held:,} characters",
            where=where,
            repair="write the file as .jsonl, one object per line: there rows of any length can be dropped",
        )
    return DataError(
        f"the row is not JSON: {_why_no_json(problem)}",
        where=where,
        repair="fix the file; the rows after this one cannot be found",
    )


def _why_no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _checked(value: Any, written: bytes) -> Value:
    """A parsed JSON value, if it is a row."""
    if isinstance(value, DataError):
        return value
    if not isinstance(value, dict):
        return DataError(f"the row is a {type(value).__name__}, not an object with columns")
    if _SURROGATES.search(written):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return DataError("the row holds half of a surrogate pair, which is not a valid character", repair=_CLEAN)
    return value


def _repeated(error: RepeatedKey) -> DataError:
    return DataError(f"{error}: only one of the two values can be meant", repair="remove one of them")


def _not_utf8(at: int | None = None) -> DataError:
    place = "" if at is None else f" at byte {at}"
    return DataError(f"the row is not UTF-8{place}", repair="save the file as UTF-8")


def _too_long(reading: Reading) -> DataError:
    return DataError(
        f"the row is longer than {reading.max_row_bytes:,} bytes",
        repair="split it into smaller rows, or raise prepare.max_row_bytes",
    )


def _byte_order_mark() -> DataError:
    return DataError("the row begins with a byte order mark", repair="remove it (it is left over from joining files)")


# --- tables ---------------------------------------------------------------------------------------------------------


def read_csv(piece: ByteRange, reading: Reading) -> Iterator[Value | None]:
    """Rows of separated values below the file's header; of CSV, by semicolons or tabs if the header has no comma."""
    csv.field_size_limit(2**31 - 1)
    with opened(piece.file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        header = text.readline()
        # Spreadsheets write semicolons where the comma is for decimals.
        between = "\t" if piece.kind == "tsv" else next((separator for separator in ",;\t" if separator in header), ",")
        begins, after_space = _first_lines(header, text, between)
        reader = csv.DictReader(chain(begins, text), delimiter=between, strict=True, skipinitialspace=after_space)
        try:
            columns = list(reader.fieldnames or [])
            "".join(columns).encode("utf-8")
            twice = sorted(name for name, count in Counter(columns).items() if count > 1)
            if twice:
                raise DataError(
                    f"the header has {len(twice)} name{'s' if len(twice) > 1 else ''} more than once: "
                    f"{cut(', '.join(f'`{name}`' for name in twice))}",
                    where=piece.file,
                    repair="give every column a different name",
                )
        except csv.Error as error:
            raise DataError(f"the header is not CSV: {error}", where=piece.file, repair="fix the first line") from None
        except UnicodeEncodeError:
            raise DataError("the header is not UTF-8", where=piece.file, repair="save the file as UTF-8") from None
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield DataError(f"the row is not CSV: {error}", repair="quote the value, and double quotes in it")
            else:
                yield _checked_csv(row, len(columns), reading)


def _first_lines(header: str, text: io.TextIOWrapper, between: str) -> tuple[list[str], bool]:
    """The first lines of a file, and whether its values follow a space (`a, "b"`), so that quotes after one are quotes
    and not part of the value."""
    lines = [header]
    if all(name[:1] == " " for name in header.split(between)[1:]) and between in header:
        return lines, True
    length = 0
    for line in text:
        lines.append(line)
        length += len(line)
        if len(lines) > _MOST_LINES or length > CHUNK:
            break
    try:
        plain, after = (list(csv.reader(lines, delimiter=between, skipinitialspace=skips)) for skips in (False, True))
    except csv.Error:
        return lines, False
    # More than the spaces themselves must differ.
    return lines, [[value.lstrip(" ") for value in row] for row in plain] != [
        [value.lstrip(" ") for value in row] for row in after
    ]


def _checked_csv(row: dict[Any, Any], columns: int, reading: Reading) -> Value:
    if None in row or None in row.values():
        extra = len(row.get(None) or ())
        count = columns + extra - sum(value is None for value in row.values())
        return DataError(
            f"the row has {count} columns, but the header has {columns}",
            repair="quote a value that holds the separator or a line break, or set data.on_bad_row to drop",
        )
    text = "".join(row.values())
    try:
        length = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return _not_utf8()
    if length > reading.max_row_bytes:
        return _too_long(reading)
    if text.startswith("\ufeff"):
        return _byte_order_mark()
    # Line ends within quotes come from the file, not from the text.
    return {name: value.replace("\r\n", "\n") for name, value in row.items()} if "\r\n" in text else row


# Whose records all have the same fields: one that a record does not have is null.
TABLE_KINDS: frozenset[Kind] = frozenset(("parquet", "arrow", "datasets"))
TABLE_SUFFIXES = frozenset(suffix for suffix, kind in _KINDS.items() if kind in TABLE_KINDS)


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A column of a table without the null fields of records within records, such as the arguments of a tool call; a
    column's own record, or each of a list of them, keeps its fields."""
    if isinstance(value, list):
        return [without_nulls(item, depth) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item, depth + 1) for name, item in value.items() if not depth or item is not None}
    return value


def read_parquet(piece: ByteRange) -> Iterator[Value | None]:
    """Rows of some row groups."""
    import pyarrow.parquet as pq

    with opened(piece.file) as stream, pq.ParquetFile(stream) as table:
        groups = list(range(piece.start, table.num_row_groups if piece.stop is None else piece.stop))
        yield from _table_rows(table.iter_batches(batch_size=1024, row_groups=groups), piece.file)


def read_arrow(piece: ByteRange) -> Iterator[Value | None]:
    """Rows of an Arrow file or stream."""
    import pyarrow as pa

    with opened(piece.file) as stream:
        try:
            reader: Any = pa.ipc.open_file(stream)
            batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            stream.seek(0)
            try:
                batches = pa.ipc.open_stream(stream)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"not an Arrow file: {first_line(error)}", where=piece.file) from None
        yield from _table_rows(batches, piece.file)


def _table_rows(batches: Iterable[Any], file: str) -> Iterator[Value]:
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"two columns are called `{twice}`", where=file, repair="rename one of them")
        try:
            values = batch.to_pylist()
        except (ValueError, OverflowError):
            # Text that is not UTF-8, or a date out of Python's range.
            values = []
            for at in range(len(batch)):
                try:
                    values += batch.slice(at, 1).to_pylist()
                except UnicodeDecodeError:
                    values.append(DataError("the row is not UTF-8", repair=_CLEAN))
                except (ValueError, OverflowError) as error:
                    repair = "write the value as text or as a number"
                    values.append(
                        DataError(f"the row holds a value that Python cannot represent: {error}", repair=repair)
                    )
        yield from values


# --- text -----------------------------------------------------------------------------------------------------------


def read_text(piece: ByteRange, reading: Reading, *, name: str) -> Iterator[Value | None]:
    """Rows with columns `text` and `path` of a text file; empty ones are skipped."""
    with opened(piece.file) as stream:
        content = stream.read().removeprefix(_BOM).replace(b"\r\n", b"\n")
    parts = [content]
    if reading.text_rows == "line":
        parts = content.split(b"\n")
    elif reading.text_rows == "paragraph":
        parts = re.split(rb"\n(?:[ \t]*\n)+", content.strip(b"\n"))
    for part in parts:
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError as error:
            yield _not_utf8(error.start)
        else:
            yield {"text": text, "path": name} if text.strip() else None
