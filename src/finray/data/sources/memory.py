"""Writes a program's rows to a file: workers, later starts and digests then treat them like any other source.

The file is named by a digest of its content. So the same rows are the same source when a run is continued, and other
rows are a different one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finray.data.sources.features import class_names, features_in
from finray.data.sources.readers import without_nulls
from finray.errors import DataError
from finray.limits import cut

# The folder of such files, next to the prepared datasets.
ROWS = "rows"
# pandas' name for an index that it exports as a column.
_INDEX = "__index_level_"
_ROWS = "a list of dicts, a datasets.Dataset, or a pandas or Arrow table"


def write_rows(rows: Any, folder: Path) -> Path:
    """Write rows to a file of JSON lines in the folder, unless it exists; returns the file.

    Rows whose ``datasets`` features name classes become an Arrow file, which keeps the names.

    Args:
        rows: mappings of column to value, or a table (of pandas, Arrow, or anything that exports Arrow streams).
        folder: created if missing.

    Raises:
        DataError: there are no rows, one of them cannot be written as JSON, or the folder cannot be written.
    """
    digest = hashlib.sha256()
    scratch = folder / f".tmp-{os.getpid()}-{id(rows)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            count, suffix = 0, "jsonl"
            if (table := _with_classes(rows)) is not None:
                count, suffix = _write_table(table, scratch), "arrow"
                digest.update(scratch.read_bytes())
            else:
                with scratch.open("wb") as stream:
                    for count, row in enumerate(_each(rows), 1):
                        line = _line(row, count)
                        digest.update(line)
                        stream.write(line)
            if not count:
                raise DataError("there are no rows", where="data.source", repair=f"pass {_ROWS} with at least one row")
            path = folder / f"{digest.hexdigest()[:24]}.{suffix}"
            if not path.is_file():
                os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"the rows cannot be written: {error.strerror}", where=str(folder)) from None
    return path


def _with_classes(rows: Any) -> Any:
    """The rows as an Arrow stream with a schema, if it names classes, which JSON lines would lose."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None) or getattr(rows, "schema", None)
    if not any(map(class_names, features_in(schema).values())):
        return None
    import pyarrow as pa

    if not hasattr(rows, "with_format"):
        return pa.RecordBatchReader.from_stream(rows)
    tables = rows.with_format("arrow").iter(batch_size=1024)
    return pa.RecordBatchReader.from_batches(
        schema, (batch for table in tables for batch in table.cast(schema).to_batches())
    )


def _write_table(table: Any, file: Path) -> int:
    """Write a stream to an Arrow file; returns the number of rows."""
    import pyarrow as pa

    rows = 0
    with pa.ipc.new_file(str(file), table.schema) as writer:
        for batch in table:
            writer.write_batch(batch)
            rows += len(batch)
    return rows


def _each(rows: Any) -> Iterator[Any]:
    if hasattr(rows, "__arrow_c_stream__"):
        import pyarrow as pa

        try:
            for batch in pa.RecordBatchReader.from_stream(rows):
                for row in batch.to_pylist():
                    yield {name: without_nulls(value) for name, value in row.items() if not name.startswith(_INDEX)}
        except (pa.ArrowException, TypeError, ValueError) as error:
            # Of pandas, whose columns may hold values of different types.
            why = error.args[-1] if error.args else type(error).__name__
            raise DataError(
                f"the table cannot be read: {cut(str(why))}",
                where="data.source",
                repair="give each column one type and a name of its own, or pass a list of dicts",
            ) from None
    elif isinstance(rows, Iterable) and not isinstance(rows, Mapping | str | bytes):
        if not hasattr(rows, "with_format"):
            yield from rows
            return
        # A dataset that is set to return tensors returns plain values without its format.
        for row in rows.with_format(None):
            yield {name: without_nulls(value) for name, value in row.items()}
    else:
        kind = type(rows).__name__
        hint = " of one split" if isinstance(rows, Mapping) else ""
        raise DataError(f"a {kind} is not a data source", where="data.source", repair=f"pass a path, or {_ROWS}{hint}")


def _line(row: Any, number: int) -> bytes:
    try:
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a dict of columns, not {type(row).__name__}")
        text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
        return (text + "\n").encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the row cannot be written as JSON: {error}",
            where=f"row {number} in memory",
            repair="use text, numbers, lists and dicts, and None where a value is missing",
        ) from None


def _plain(value: Any) -> Any:
    """Convert types that JSON lacks: NumPy values, times, paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
