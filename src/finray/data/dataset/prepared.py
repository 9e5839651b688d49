"""The prepared dataset on disk: token rows in memory-mapped Arrow files, and a manifest that says what shaped them.

A directory without a manifest is not one. docs/formats.md is the specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from finray.config.schema import DataConfig
from finray.data.dataset.fetch import DatasetFiles
from finray.data.dataset.manifest import DataFile, Manifest, StreamEntry
from finray.data.sampling.order import mix
from finray.data.sampling.splits import hold_out, mixed, sizes_of_mix
from finray.data.storage import Folder
from finray.errors import DataError

MANIFEST = "manifest.json"
BAD_ROWS = "bad-rows.jsonl"

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Block:
    """A record batch of tokens: first row within the part, values and offsets."""

    start: int
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int32]


class _Part:
    """The tokens of one part, mapped when the first row is read."""

    def __init__(self, files: DatasetFiles, name: str) -> None:
        self.name = name
        self._files = files

    @cached_property
    def _blocks(self) -> list[_Block]:
        blocks, start = [], 0
        for batch in _batches(self._files.path(self.name)):
            ids, mask = batch.column(0), batch.column(1)
            blocks.append(_Block(start, ids.values.to_numpy(), mask.values.to_numpy(), ids.offsets.to_numpy()))
            start += len(batch)
        return blocks

    @cached_property
    def _starts(self) -> IntArray:
        return np.array([block.start for block in self._blocks], dtype=np.int64)

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        block = self._blocks[int(np.searchsorted(self._starts, number, side="right")) - 1]
        within = number - block.start
        span = slice(int(block.offsets[within]), int(block.offsets[within + 1]))
        return block.ids[span], block.mask[span]


class PreparedSplit:
    """Rows of one split, read by index.

    Attributes:
        lengths: int64 tokens per row.
        supervised: int64 targets per row.
        source_rows: int64 row number in the sources of the split, from 0.
        digests: int64 hash of each row's token ids.
        streams: int64 number of the source that each row came from.
        labels: class of each row, for labelled text.
    """

    def __init__(self, files: DatasetFiles, streams: Sequence[StreamEntry], indices: IntArray | None = None) -> None:
        self._files = files
        self._streams = streams
        parts = [(number, stream, part) for number, stream in enumerate(streams) for part in stream.parts]
        self._entries = [part for _, _, part in parts]
        self._parts = [_Part(files, f"{stream.name}/{part.tokens.name}") for _, stream, part in parts]
        counts = [part.rows for part in self._entries]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        indices_of = [f"{stream.name}/{part.index.name}" for _, stream, part in parts]
        files.prefetch(indices_of)
        self._index = _Index([files.path(name) for name in indices_of])
        before = np.concatenate([[0], np.cumsum([part.source_rows for part in self._entries], dtype=np.int64)])
        everything = np.arange(self._starts[-1])
        self._indices: IntArray = everything if indices is None else indices
        select = slice(None) if indices is None else indices
        self.lengths = self._index.int64("length")[select]
        self.supervised = self._index.int64("supervised")[select]
        self.digests = self._index.int64("digest")[select]
        source_rows = self._index.int64("source_row") + np.repeat(before[:-1], counts)
        self.source_rows = source_rows[select]
        self._groups = self._index.int64("group")[select] if self._index.has("group") else None
        self.streams = np.repeat([number for number, _, _ in parts], counts).astype(np.int64)[select]

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def groups(self) -> IntArray:
        """int64, equal where rows must stay on one side of a split: by `data.group_by`, else rows that are the same.

        The rows of one source row (pieces of a text, parts of a conversation) stay together, with those of any source
        row that became the same rows.
        """
        if self._groups is not None:
            return self._groups
        _, first, number = np.unique(self.source_rows, return_index=True, return_inverse=True)
        within = np.arange(len(number)) - first[number]
        # A sum of hashes that depend on the place within the source row, with the wrap-around of 64 bits.
        combined = np.zeros(len(first), dtype=np.uint64)
        np.add.at(combined, number, mix(self.digests.view(np.uint64) ^ mix(within.astype(np.uint64))))
        return combined.view(np.int64)[number]

    def take(self, indices: IntArray) -> PreparedSplit:
        """Some of the rows, in this order; a row may stand more than once."""
        return PreparedSplit(self._files, self._streams, self._indices[indices])

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Token ids and loss mask of a row, as views of the mapped file."""
        part, within = self._find(number)
        return self._parts[part].row(within)

    def where(self, number: int) -> str:
        """``file:row`` in the source."""
        part, _ = self._find(number)
        at = int(self._indices[number])
        piece = self._entries[part].pieces[int(self._index.int64("piece")[at])]
        return f"{piece.file}:{piece.first + int(self._index.int64('number')[at])}"

    @property
    def labels(self) -> list[str]:
        """Class of each row, for labelled text."""
        found = self._index.strings("label")
        return [found[int(at)] for at in self._indices]

    def prefetch(self, rows: Iterable[int]) -> None:
        """Say in which order rows will be read, so that remote files are fetched in that order."""
        names: dict[str, None] = {}
        for row in rows:
            names.setdefault(self._parts[self._find(row)[0]].name)
            if len(names) == len(self._parts):
                break
        self._files.prefetch(names)

    def _find(self, number: int) -> tuple[int, int]:
        at = int(self._indices[number])
        part = int(np.searchsorted(self._starts, at, side="right")) - 1
        return part, at - int(self._starts[part])


class _Index:
    """Columns of the index files, joined."""

    def __init__(self, paths: list[Path]) -> None:
        self._tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in paths]
        self._tables = [table for table in self._tables if len(table)]
        self._cache: dict[str, IntArray] = {}

    def has(self, column: str) -> bool:
        return bool(self._tables) and column in self._tables[0].column_names

    def int64(self, column: str) -> IntArray:
        if column not in self._cache:
            found = [table.column(column).to_numpy() for table in self._tables]
            self._cache[column] = np.concatenate([np.empty(0, np.int64), *found]).astype(np.int64)
        return self._cache[column]

    def strings(self, column: str) -> list[str]:
        return [value for table in self._tables for value in table.column(column).to_pylist()]


def _batches(path: Path) -> Iterator[Any]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of a run: to train on, to evaluate on during training, and for tests after it."""

    train: PreparedSplit
    eval: PreparedSplit | None
    test: PreparedSplit | None


class PreparedDataset:
    """A prepared dataset, local or remote.

    Args:
        location: directory or URL.
        local_dir: where files of a remote one are kept; None for the user's cache.

    Raises:
        DataError: it is not a whole prepared dataset, or a file has another size than the manifest says.
    """

    def __init__(self, location: str | Path, *, local_dir: Path | None = None) -> None:
        self.folder = Folder(location)
        content = self.folder.read(MANIFEST)
        try:
            self.manifest = Manifest.from_bytes(content or b"")
        except ValueError:
            raise DataError(
                "not a prepared data set", where=str(location), repair="run `finray prepare` again"
            ) from None
        self._check_sizes()
        self._files = DatasetFiles(self.folder, self.name, self.files(), local_dir)

    @property
    def name(self) -> str:
        """The fingerprint."""
        return self.manifest.fingerprint

    @property
    def content(self) -> str:
        """A digest of all tokens: equal exactly when the rows are."""
        return self.manifest.content

    def kind(self, split: str = "train") -> str:
        """What rows are: ``chat``, ``completion``, ``text`` or ``labelled``."""
        return str(self.manifest.splits[split].kind)

    def files(self) -> Iterator[tuple[str, DataFile]]:
        """Every data file: its path in the dataset, and size and SHA-256."""
        for split in self.manifest.splits.values():
            for stream in split.streams:
                yield from stream.files()

    def _check_sizes(self) -> None:
        found = dict(self.folder.files())
        for name, expected in self.files():
            if found.get(name) != expected.bytes:
                raise DataError(
                    "a file of the prepared data set is missing or cut off",
                    where=self.folder.at(name),
                    repair=f"delete {self.folder.root} and run the command again",
                )

    def all_rows(self, split: str) -> PreparedSplit | None:
        """All rows that were prepared for a split; None where there are none."""
        if split not in self.manifest.splits:
            return None
        return PreparedSplit(self._files, self.manifest.splits[split].streams)

    def splits(self, data: DataConfig, *, seed: int) -> Splits:
        """The rows of a run: held out by ratio where the config says so, then mixed.

        Raises:
            DataError: too few rows, or groups, to hold some out.
        """
        train, held_out, test = self.all_rows("train"), self.all_rows("eval"), self.all_rows("test")
        assert train is not None
        if data.eval_ratio or data.test_ratio:
            chosen = hold_out(train.groups, eval_ratio=data.eval_ratio, test_ratio=data.test_ratio, seed=seed)
            held_out = train.take(chosen.eval) if data.eval_ratio else held_out
            test = train.take(chosen.test) if data.test_ratio else test
            train = train.take(chosen.train)
        if data.mix:
            available = np.bincount(train.streams, minlength=len(data.mix)).tolist()
            wanted = sizes_of_mix(available, [one.weight for one in data.mix], [one.count for one in data.mix])
            train = train.take(mixed(train.streams, wanted, seed=seed))
        return Splits(train, held_out, test)
