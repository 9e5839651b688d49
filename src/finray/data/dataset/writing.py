"""The two Arrow files of a part: the tokens, and an index that says where each row lies and where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from finray.data.dataset.manifest import DataFile
from finray.data.storage import Folder
from finray.data.tokenize.encode import Tokens
from finray.errors import DataError

TOKENS = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
INDEX = pa.schema(
    [
        ("length", pa.int32()),
        ("supervised", pa.int32()),
        ("source_row", pa.int64()),
        ("piece", pa.int32()),
        ("number", pa.int64()),
        ("digest", pa.int64()),
    ]
)
_ROWS_PER_BATCH = 1024


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row and where it came from: position in the part, piece, number in the piece, value of the group column."""

    tokens: Tokens
    position: int
    piece: int
    number: int
    group: Any = None


def hash64(content: bytes) -> int:
    """A signed 64-bit hash: the first eight bytes of BLAKE2b, little-endian."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


class RowWriter:
    """Writes rows to the files ``tokens-STEM.arrow`` and ``index-STEM.arrow`` of a folder, a batch at a time.

    Attributes:
        longest: tokens of the longest row.
        labels: all labels seen.
    """

    def __init__(self, folder: Folder, stem: str) -> None:
        self._folder = folder
        self._names = {"tokens": f"tokens-{stem}.arrow", "index": f"index-{stem}.arrow"}
        self._scratch = {role: folder.scratch(name) for role, name in self._names.items()}
        self._sink = pa.OSFile(str(self._scratch["tokens"]), "wb")
        self._tokens = pa.ipc.new_file(self._sink, TOKENS)
        self._index: list[pa.RecordBatch] = []
        self._waiting: list[WrittenRow] = []
        self.longest = 0
        self.labels: set[str] = set()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.close()
        for path in self._scratch.values():
            path.unlink(missing_ok=True)

    def add(self, row: WrittenRow) -> None:
        """Add a row."""
        if self._waiting and (self._waiting[0].tokens.label is None) != (row.tokens.label is None):
            raise DataError("rows with a label and rows without one cannot stand in one data set")
        self._waiting.append(row)
        if len(self._waiting) == _ROWS_PER_BATCH:
            self._flush()

    def finish(self) -> dict[str, DataFile]:
        """Put both files in place; returns name, size and SHA-256 of each."""
        self._flush()
        self._tokens.close()
        self._sink.close()
        empty = pa.record_batch([pa.array([], field.type) for field in INDEX], schema=INDEX)
        batches = self._index or [empty]
        with (
            pa.OSFile(str(self._scratch["index"]), "wb") as sink,
            pa.ipc.new_file(sink, batches[0].schema) as index,
        ):
            for batch in batches:
                index.write_batch(batch)
        described = {role: _describe(self._names[role], path) for role, path in self._scratch.items()}
        for role, path in self._scratch.items():
            self._folder.adopt(path, self._names[role])
        return described

    def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        lengths = np.fromiter((len(row.tokens.ids) for row in rows), dtype=np.int32, count=len(rows))
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        ids = np.empty(int(offsets[-1]), dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for row, start in zip(rows, offsets.tolist(), strict=False):
            ids[start : start + len(row.tokens.ids)] = row.tokens.ids
            for low, high in row.tokens.spans:
                mask[start + low : start + high] = 1
        lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (ids, mask)]
        self._tokens.write_batch(pa.record_batch(lists, schema=TOKENS))
        self._index.append(_index_batch(rows, lengths, ids, offsets))
        self.longest = max(self.longest, int(lengths.max()))
        self.labels |= {row.tokens.label for row in rows if row.tokens.label is not None}


def _index_batch(
    rows: list[WrittenRow], lengths: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int32]
) -> Any:
    bounds = offsets.tolist()
    columns: dict[str, Any] = {
        "length": lengths,
        "supervised": [row.tokens.supervised for row in rows],
        "source_row": [row.position for row in rows],
        "piece": [row.piece for row in rows],
        "number": [row.number for row in rows],
        "digest": [hash64(ids[low:high].tobytes()) for low, high in pairwise(bounds)],
    }
    schema = INDEX
    if rows[0].group is not None:
        columns["group"] = [hash64(json.dumps(row.group, sort_keys=True, default=str).encode()) for row in rows]
        schema = schema.append(pa.field("group", pa.int64()))
    if rows[0].tokens.label is not None:
        columns["label"] = [row.tokens.label for row in rows]
        schema = schema.append(pa.field("label", pa.string()))
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _describe(name: str, path: Path) -> DataFile:
    with path.open("rb") as stream:
        return DataFile(name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
