"""Splits sources into parts that can be processed independently, and reads them piece by piece.

Piece boundaries depend only on the sizes of the files, so the same source has the same pieces on any cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from finray.data.sources import hub
from finray.data.sources.readers import (
    ByteRange,
    Reading,
    Value,
    kind_of,
    raw_lines,
    read_array,
    read_arrow,
    read_csv,
    read_lines,
    read_parquet,
    read_text,
)
from finray.data.sources.resolve import Source, SourceRow
from finray.data.storage import is_compressed, opened, size
from finray.errors import DataError
from finray.files import first_line

PIECE_BYTES = 4 * 2**20
ROWS_PER_PIECE = 8192
MOST_PARTS = 4096


def plan_parts(source: Source, reading: Reading) -> list[tuple[ByteRange, ...]]:
    """Split the source into parts of about equal size, each of one or more pieces; a pure function of the source.
    Raises DataError: a file cannot be opened."""
    if not source.is_files:
        rows, each = len(hub.load(source)), ROWS_PER_PIECE
        while rows > each * MOST_PARTS:
            each *= 2
        starts = range(0, rows, each)
        return [(ByteRange(source.name, "datasets", at, min(at + each, rows), at),) for at in starts]
    sizes = {file: size(file) for file in source.files}
    target = PIECE_BYTES
    while sum(sizes.values()) > target * MOST_PARTS:
        target *= 2
    weighed = [item for file in source.files for item in _pieces(file, sizes[file], target)]
    if source.slice is not None:
        weighed = _sliced(weighed, source, reading)
    parts: list[list[ByteRange]] = []
    room = 0
    for piece, weight in weighed:
        if parts and weight <= room:
            parts[-1].append(piece)
            room -= weight
        else:
            parts.append([piece])
            room = target - weight
    return [tuple(part) for part in parts]


def _pieces(file: str, length: int, target: int) -> Iterator[tuple[ByteRange, int]]:
    """Pieces of a file, with the approximate size of each in bytes."""
    kind = kind_of(file)
    # Plain HTTP servers may not support range requests.
    whole = is_compressed(file) or file.startswith(("http://", "https://"))
    if kind == "lines" and not whole and length > target:
        count = -(-length // target)
        for index in range(count):
            stop = (index + 1) * target if index + 1 < count else None
            yield ByteRange(file, kind, index * target, stop, 0 if index == 0 else None), target
    elif kind == "parquet":
        yield from _row_groups(file, target)
    else:
        yield ByteRange(file, kind), length


def _row_groups(file: str, target: int) -> Iterator[tuple[ByteRange, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(file) as stream:
        try:
            about = pq.ParquetFile(stream).metadata
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"not a Parquet file: {first_line(error)}", where=file) from None
    start = rows = weight = before = 0
    for index in range(about.num_row_groups):
        group = about.row_group(index)
        rows += group.num_rows
        weight += group.total_byte_size
        if weight >= target or index + 1 == about.num_row_groups:
            yield ByteRange(file, "parquet", start, index + 1, before), weight
            start, before, weight = index + 1, rows, 0


def _sliced(weighed: list[tuple[ByteRange, int]], source: Source, reading: Reading) -> list[tuple[ByteRange, int]]:
    assert source.slice is not None
    counts = [_count(piece, source, reading) for piece, _ in weighed]
    low, high = source.slice.of(sum(rows for rows, _ in counts))
    kept, before, lines = [], 0, 0
    for (piece, weight), (rows, passed) in zip(weighed, counts, strict=True):
        start, stop = max(low - before, 0), min(high - before, rows)
        lines = lines if piece.start else 0
        if start < stop:
            first = lines if piece.first is None else piece.first
            kept.append((replace(piece, keep=(start, stop), first=first), weight * (stop - start) // rows))
        before += rows
        lines += passed
    return kept


def _count(piece: ByteRange, source: Source, reading: Reading) -> tuple[int, int]:
    """Number of rows in a piece, and that including blank ones."""
    if piece.kind == "lines":
        lines = [line is None or bool(line.strip()) for line in raw_lines(piece, reading)]
        return sum(lines), len(lines)
    rows = sum(1 for _ in read_piece(piece, source, reading))
    return rows, rows


def count_rows(source: Source, reading: Reading) -> int:
    """Number of rows in a source's files, ignoring its slice."""
    whole = replace(source, slice=None)
    return sum(_count(piece, whole, reading)[0] for part in plan_parts(whole, reading) for piece in part)


def read_piece(
    piece: ByteRange, source: Source, reading: Reading, *, saw: Callable[[int], None] = lambda number: None
) -> Iterator[tuple[int, Value]]:
    """The rows of a piece, good and bad, each with its number in the piece; ``saw`` is called with the number of every
    row that was read, including blank ones.
    Raises DataError: the file as a whole cannot be read."""
    match piece.kind:
        case "lines":
            values = read_lines(piece, reading)
        case "array":
            values = read_array(piece, reading)
        case "csv" | "tsv":
            values = read_csv(piece, reading)
        case "parquet":
            values = read_parquet(piece)
        case "arrow":
            values = read_arrow(piece)
        case "text":
            values = read_text(piece, reading, name=source.short(piece.file))
        case "datasets":
            values = hub.rows(source, piece.start, piece.stop)
    low, high = piece.keep or (0, None)
    position = 0
    for number, value in enumerate(values, start=1):
        saw(number)
        if value is None:
            continue
        if high is not None and position >= high:
            break
        if position >= low:
            yield number, value
        position += 1


def read(source: Source, reading: Reading | None = None) -> Iterator[SourceRow]:
    """All rows of a source, in order. Raises DataError: a file or row cannot be read; the message names both."""
    reading = reading or Reading()
    for part in plan_parts(source, reading):
        for piece in part:
            first = row_number(piece, 0, reading)
            for number, value in read_piece(piece, source, reading):
                if isinstance(value, DataError):
                    raise bad_row(value, piece, number, reading)
                yield SourceRow(piece.file, first + number, value)


def read_file(path: Path) -> Iterator[SourceRow]:
    """Rows of one local file, by its suffix."""
    yield from read(Source(str(path), (str(path),)))


def row_number(piece: ByteRange, number: int, reading: Reading) -> int:
    """The number of a row in its file, from its number in the piece; counts earlier rows if necessary."""
    if piece.first is not None:
        return piece.first + number
    return number + sum(1 for _ in raw_lines(ByteRange(piece.file, "lines", 0, piece.start), reading))


def bad_row(problem: DataError, piece: ByteRange, number: int, reading: Reading) -> DataError:
    """The error of a row with its location, ``file:row``."""
    where = f"{piece.file}:{row_number(piece, number, reading)}"
    return DataError(problem.message, where=where, repair=problem.repair)
