"""Columns of numbers that a pass over the prepared rows has computed, kept beside them.

A column has a number for each target of a row, and a name that is a digest of the rows and of all that made it. Its
files have a thousand rows each and their own digest in their name, so any number of workers can write them, a killed
pass continues, and what was changed is found. docs/formats.md is the specification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from finray.data.dataset.manifest import Manifest
from finray.data.dataset.plan import fingerprint
from finray.data.storage import Folder
from finray.errors import DataError

FOLDER = "columns"
# Rows of a file.
ROWS = 1024
_SCHEMA = pa.schema([("values", pa.list_(pa.float32()))])
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers of all rows of a split, as they were prepared."""

    parts: Sequence[tuple[npt.NDArray[np.int32], Floats]]  # of each file: where rows begin, and their numbers

    def of(self, row: int) -> Floats:
        """A row's, one for each target."""
        starts, values = self.parts[row // ROWS]
        return values[starts[row % ROWS] : starts[row % ROWS + 1]]


class ColumnFiles:
    """The files of a column of one split.

    Args:
        folder: of the prepared dataset.
        manifest: of the dataset.
        split: ``train``, ``eval`` or ``test``.
        made_by: what the numbers depend on besides the rows, as JSON types.
    """

    def __init__(self, folder: Folder, manifest: Manifest, split: str, made_by: Mapping[str, Any]) -> None:
        self._shape = {"version": 1, "rows": manifest.content, "split": split, **made_by}
        self._folder = folder.sub(f"{FOLDER}/{fingerprint(self._shape)}")
        self._rows = manifest.splits[split].rows

    @classmethod
    def stored(cls, folder: Folder, manifest: Manifest, split: str, name: str) -> list[Column]:
        """Every whole column of a split that was made under this name, by whatever model.
        Raises DataError: a file was changed."""
        columns = []
        for place in sorted({path.split("/")[0] for path, _ in folder.sub(FOLDER).files()}):
            content = folder.read(f"{FOLDER}/{place}/made_by.json") or b"{}"
            try:
                made: dict[str, Any] = dict(json.loads(content))
            except (ValueError, TypeError, RecursionError):
                continue
            if fingerprint(made) == place and (made.get("split"), made.get("column")) == (split, name):
                files = cls(folder, manifest, split, made)
                columns += [files.read()] if not files.missing() else []
        return columns

    def rows(self, part: int) -> range:
        """The rows of a file."""
        return range(part * ROWS, min((part + 1) * ROWS, self._rows))

    def missing(self) -> list[int]:
        """Numbers of the files that are not there."""
        there = self._names()
        return [part for part in range(-(-self._rows // ROWS)) if part not in there]

    def write(self, part: int, values: Iterable[Floats]) -> None:
        """Write a file, of a number for each target of each row. Raises DataError: storage fails."""
        rows = list(values)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        arrays = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows).astype(np.float32)))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch([arrays], schema=_SCHEMA))
        content = sink.getvalue().to_pybytes()
        try:
            self._folder.write("made_by.json", (json.dumps(self._shape, indent=1) + "\n").encode())
            self._folder.write(f"part-{part:05d}-{_digest(content)}.arrow", content)
        except OSError as error:
            raise DataError(f"the column cannot be written: {error.strerror}", where=self._folder.root) from None

    def read(self) -> Column:
        """All numbers. Raises DataError: a file is missing, or was changed after it was written."""
        parts, names = [], self._names()
        for part in range(-(-self._rows // ROWS)):
            content = self._folder.read(names[part]) if part in names else None
            if content is None or _digest(content) not in names[part]:
                raise DataError(
                    "a file of a column is missing, or was changed after it was written",
                    where=self._folder.at(names.get(part, f"part-{part:05d}")),
                    repair=f"delete {self._folder.root} and run the command again",
                )
            column = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0).column(0)
            parts.append((column.offsets.to_numpy(), column.values.to_numpy()))
        return Column(parts)

    def _names(self) -> dict[int, str]:
        """Files by their number; where two machines wrote one, the first by name."""
        names = [name for name, _ in self._folder.files() if name.startswith("part-") and name.endswith(".arrow")]
        return {int(name.split("-")[1]): name for name in sorted(names, reverse=True)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
