"""The prepared dataset on disk: token rows in memory-mapped Arrow files, and a manifest of what they depend on.

A directory without a manifest is incomplete. docs/formats.md is the specification.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from finray.config.schema import DataConfig
from finray.config.tasks import TaskSpec
from finray.data.dataset.columns import Column
from finray.data.dataset.fetch import DatasetFiles
from finray.data.dataset.manifest import MANIFEST, DataFile, Manifest, StreamEntry
from finray.data.dataset.plan import ROWS_PER_BATCH
from finray.data.formats.labels import Label, LabelSet
from finray.data.sampling.groups import Groups
from finray.data.sampling.order import derive_key, mix
from finray.data.sampling.splits import hold_out, mixed, sample, sizes_of_mix
from finray.data.storage import Folder
from finray.errors import DataError

BAD_ROWS = "bad-rows.jsonl"
KINDS = ("chat", "completion", "text", "labelled", "preference", "unpaired")

# Begins the names of columns of values in the index.
VALUE = "value:"
IntArray = npt.NDArray[np.int64]
# Rows with the same prompt that a search for another prompt passes.
_MOST_PASSED = 1000


class PreparedSplit:
    """Rows of one split, accessed by index.

    Attributes:
        lengths: int64 tokens per row.
        supervised: int64 targets per row.
        source_rows: int64 row number in the sources of the split, from 0.
        digests: int64 hash of each row's token ids.
        streams: int64 number of the source that each row came from.
        groups: rows that are never torn.
        name: of the split that the rows were prepared for.
        columns: what a pass over the data computed, by name; shared with all that is taken from these rows.
    """

    def __init__(self, files: DatasetFiles, streams: Sequence[StreamEntry], name: str = "train") -> None:
        self._files = files
        self.name = name
        self.columns: dict[str, Column] = {}
        parts = [(number, stream, part) for number, stream in enumerate(streams) for part in stream.parts]
        self._parts = [part for _, _, part in parts]
        self._token_files = [f"{stream.name}/{part.tokens.name}" for _, stream, part in parts]
        # By part number: batches of token ids, masks and offsets, mapped when the first row is read.
        self._tokens: dict[int, list[tuple[Any, Any, Any]]] = {}
        index_files = [f"{stream.name}/{part.index.name}" for _, stream, part in parts]
        files.prefetch(index_files)
        self._index = [pa.ipc.open_file(pa.memory_map(str(files.path(name)))).read_all() for name in index_files]
        counts = [part.rows for part in self._parts]
        self._starts: IntArray = np.cumsum([0, *counts])
        before: IntArray = np.cumsum([0, *(part.source_rows for part in self._parts)])[:-1]
        # The following arrays have one entry per row, and are what `take` selects from.
        self._rows = np.arange(self._starts[-1])
        self.lengths = self._column("length")
        self.supervised = self._column("supervised")
        self.digests = self._column("digest")
        self.source_rows = self._every_source_row = self._column("source_row") + np.repeat(before, counts)
        self.streams = np.repeat([number for number, _, _ in parts], counts).astype(np.int64)
        self._keys = self._optional("group")
        self._follows = self._optional("follows")
        self.groups = self._grouped()

    def _grouped(self) -> Groups:
        return Groups.single(len(self)) if self._follows is None else Groups.of(self._follows)

    def _optional(self, name: str) -> IntArray | None:
        """A column that only some parts may have, 0 in the others; None if no part has it."""
        if not any(name in table.column_names for table in self._index):
            return None
        tables = [table for table in self._index if len(table)]
        nothing = [np.zeros(len(table), np.int64) for table in tables]
        has = [name in table.column_names for table in tables]
        each = zip(tables, nothing, has, strict=True)
        return np.concatenate([table.column(name).to_numpy() if there else zeros for table, zeros, there in each])

    def _column(self, name: str) -> IntArray:
        arrays = [table.column(name).to_numpy() for table in self._index if len(table)]
        return np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> IntArray:
        """int64; equal for rows that must stay in the same split: by `data.group_by`, else identical rows.

        The rows of one source row (pieces of a text, parts of a conversation) stay together, also with those of any
        source row that gave the same rows.
        """
        if self._keys is not None:
            return self._keys
        _, first, number = np.unique(self.source_rows, return_index=True, return_inverse=True)
        within = np.arange(len(number)) - first[number]
        # A sum of hashes that depend on the position in the source row, modulo 2**64.
        combined = np.zeros(len(first), dtype=np.uint64)
        np.add.at(combined, number, mix(self.digests.view(np.uint64) ^ mix(within.astype(np.uint64))))
        return combined.view(np.int64)[number]

    @property
    def prompted(self) -> IntArray:
        """int64; the rows that may have a prompt: those of parts that are not plain text."""
        parts = np.searchsorted(self._starts, self._rows, side="right") - 1
        return np.flatnonzero(np.array([part.kind != "text" for part in self._parts], dtype=bool)[parts])

    @property
    def within(self) -> IntArray:
        """int64; the place of each row among the rows of its source row, from 0, whichever of them were taken."""
        return self._rows - np.searchsorted(self._every_source_row, self.source_rows)

    @property
    def chosen(self) -> str:
        """A digest of which rows were taken, and in which order; empty if all are there, as they were prepared."""
        if np.array_equal(self._rows, np.arange(self._starts[-1])):
            return ""
        return hashlib.sha256(self._rows.astype("<i8").tobytes()).hexdigest()[:16]

    def take(self, rows: IntArray) -> PreparedSplit:
        """Select rows, in this order; a row may occur more than once. Raises ValueError: a group would be torn."""
        some = copy(self)
        if self._follows is not None:
            follows = self._follows[rows]
            number = np.cumsum(self._follows == 0) - 1
            if not np.array_equal(self.groups.rows(number[rows[follows == 0]]), rows):
                raise ValueError("some rows of a group were taken, and others were not")
            some._follows = follows
        for name in ("_rows", "lengths", "supervised", "digests", "source_rows", "streams"):
            setattr(some, name, getattr(self, name)[rows])
        some._keys = None if self._keys is None else self._keys[rows]
        some.groups = some._grouped()
        return some

    def group_sizes(self, rows: Sequence[int]) -> list[int]:
        """Rows of each group, of groups one after the other; a rest of one at the beginning counts as one."""
        follows = [0] * len(rows) if self._follows is None else [0, *(int(self._follows[row]) for row in rows[1:])]
        sizes: list[int] = np.diff(Groups.of(np.array(follows)).starts).tolist()
        return sizes

    def sample(self, most: int | None, *, seed: int) -> PreparedSplit:
        """The rows to evaluate, at most ``most`` (or as many groups), in order; see :func:`splits.sample`."""
        return self.take(self.groups.rows(sample(len(self.groups), most, seed=seed)))

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Token ids, and loss mask or (for labelled text) token types of a row, as views of the mapped file."""
        return self._row(int(self._rows[number]))

    def mismatched(self, number: int, *, most: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """As :meth:`row`, the row's prompt with the answer to another prompt, cut off after ``most`` tokens.

        The answer is that of any row that was prepared for the split. Which one depends on nothing but the row's number
        among these, so it is the same in every run and epoch, whichever rows were taken.
        """
        row = int(self._rows[number])
        ids, mask = self._row(row)
        prompt, count = ids[: int(mask.argmax())], int(self._starts[-1])
        first = derive_key("mismatched", row) % count
        for at in range(min(count, _MOST_PASSED)):
            other_ids, other_mask = self._row((first + at) % count)
            begin = int(other_mask.argmax())
            if not np.array_equal(other_ids[:begin], prompt):
                break
        joined = np.concatenate([prompt, other_ids[begin:]]), np.concatenate([mask[: len(prompt)], other_mask[begin:]])
        return joined[0][:most], joined[1][:most]

    def _row(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """As :meth:`row`, by number among all prepared rows."""
        part, within = self._place(row)
        ids, mask, offsets = self._batches(part)[within // ROWS_PER_BATCH]
        at = within % ROWS_PER_BATCH
        span = slice(offsets[at], offsets[at + 1])
        return ids[span], mask[span]

    def _batches(self, part: int) -> list[tuple[Any, Any, Any]]:
        if part not in self._tokens:
            reader = pa.ipc.open_file(pa.memory_map(str(self._files.path(self._token_files[part]))))
            batches = (reader.get_batch(index).columns for index in range(reader.num_record_batches))
            self._tokens[part] = [
                (ids.values.to_numpy(), mask.values.to_numpy(), ids.offsets.to_numpy()) for ids, mask in batches
            ]
        return self._tokens[part]

    def beyond(self, size: int) -> int | None:
        """The first row with a token id of ``size`` or more; None if there is none. Reads all token files."""
        parts = np.searchsorted(self._starts, self._rows, side="right") - 1
        batch = (self._rows - self._starts[parts]) // ROWS_PER_BATCH
        beyond_rows = []
        for part in np.unique(parts).tolist():
            for number, (ids, _, _) in enumerate(self._batches(part)):
                # One pass over all tokens; single rows are looked at only where there is something to find.
                if ids.max(initial=0) >= size:
                    rows = np.flatnonzero((parts == part) & (batch == number)).tolist()
                    beyond_rows += [row for row in rows if self.row(row)[0].max(initial=0) >= size][:1]
        return min(beyond_rows, default=None)

    def where(self, number: int) -> str:
        """``file:row`` in the source."""
        part, within = self._find(number)
        piece, row = (self._index[part].column(name)[within].as_py() for name in ("piece", "number"))
        start = self._parts[part].pieces[piece]
        return f"{start.file}:{start.first + row}"

    @property
    def labels(self) -> list[Label]:
        """Label of each row, for labelled text."""
        stored = [value for table in self._index if len(table) for value in table.column("label").to_pylist()]
        return [tuple(value) if isinstance(value := stored[row], list) else value for row in self._rows.tolist()]

    def column(self, name: str, number: int) -> npt.NDArray[np.float32]:
        """A row's numbers in a column, one for each target."""
        return self.columns[name].of(int(self._rows[number]))

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """What a column of values says of each row. Raises DataError: the rows have no such column."""
        column = f"{VALUE}{name}"
        tables = [table for table in self._index if len(table)]
        if (lacking := next((table for table in tables if column not in table.column_names), None)) is not None:
            file = self._parts[self._index.index(lacking)].pieces[0].file
            raise DataError(
                f"the rows have no values `{name}`, which the objective reads",
                where=file,
                repair="prepare data whose rows have them, or change train.objective or its settings",
            )
        every = np.concatenate([np.empty(0), *(table.column(column).to_numpy() for table in tables)])
        return every[self._rows].astype(np.float64)

    def prefetch(self, rows: Iterable[int]) -> None:
        """Announce the order in which rows will be read, so that remote files are downloaded in that order."""
        names: dict[str, None] = {}
        for row in rows:
            names.setdefault(self._token_files[self._find(row)[0]])
            if len(names) == len(self._token_files):
                break
        self._files.prefetch(names)

    def _find(self, number: int) -> tuple[int, int]:
        """A row's part, and its index in the part."""
        return self._place(int(self._rows[number]))

    def _place(self, row: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return part, row - int(self._starts[part])


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of a run: for training, for evaluation during training, and for tests afterwards."""

    train: PreparedSplit
    eval: PreparedSplit | None
    test: PreparedSplit | None


class PreparedDataset:
    """A prepared dataset, local or remote.

    Args:
        location: directory or URL.
        local_dir: local copy of a remote dataset; None uses the user's cache.

    Raises:
        DataError: it is not a complete prepared dataset, or a file does not have the size in the manifest.
    """

    def __init__(self, location: str | Path, *, local_dir: Path | None = None) -> None:
        self.folder = Folder(location)
        content = self.folder.read(MANIFEST)
        if content is None:
            raise DataError("not a prepared dataset", where=str(location), repair="run `finray prepare` again")
        self.manifest = Manifest.from_bytes(content, self.folder)
        sizes = dict(self.folder.files())
        for name, expected in self.files():
            if sizes.get(name) != expected.bytes:
                raise DataError(
                    "a file of the prepared dataset is missing or cut off",
                    where=self.folder.at(name),
                    repair=f"delete {self.folder.root} and run the command again",
                )
        self._files = DatasetFiles(self.folder, self.name, self.files(), local_dir)

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        """Compare a share of the files with their digests, before any is read; every rank of a group has another share.

        Other files are checked when they are first read; see :meth:`trust`. Raises DataError: names the first file that
        was changed.
        """
        if not self.folder.is_remote:
            for name, _ in list(self.files())[rank::world_size]:
                self._files.path(name)

    def trust(self) -> None:
        """Skip further checks: all ranks of a group have checked their shares."""
        self._files.trust()

    @property
    def name(self) -> str:
        """The fingerprint."""
        return self.manifest.fingerprint

    @property
    def content(self) -> str:
        """A digest of all tokens: equal exactly when the rows are."""
        return self.manifest.content

    def kind(self, split: str = "train") -> str:
        """Kind of the rows; of a mix the first of :data:`KINDS` that some are."""
        stats = self.manifest.splits[split]
        # Older manifests know only the first row's.
        kinds = {stats.kind, *(part.kind for part in stats.parts)}
        return next((kind for kind in KINDS if kind in kinds), str(stats.kind))

    @property
    def label_set(self) -> LabelSet | None:
        """The label set of the training rows; None if they have no labels."""
        train = self.manifest.splits["train"]
        return None if train.problem is None else LabelSet(train.problem, train.labels)

    def require_kind(self, spec: TaskSpec) -> None:
        """Refuse rows of a kind that a task does not support. Raises DataError: they are of another kind."""
        if self.kind() not in spec.rows:
            raise DataError(
                f"the rows are {self.kind()}, but {spec.name} needs {', '.join(sorted(spec.rows))}",
                where="data.format",
                repair="set data.format to text to train on the text only, or model.task to sequence_classification"
                if self.kind() == "labelled"
                else "change data.format or model.task so that they match",
            )

    def files(self) -> Iterator[tuple[str, DataFile]]:
        """Every data file: its path in the dataset, and size and SHA-256."""
        for split in self.manifest.splits.values():
            for stream in split.streams:
                yield from stream.files()

    def all_rows(self, split: str) -> PreparedSplit | None:
        """All prepared rows of a split; None if there are none."""
        if split not in self.manifest.splits:
            return None
        return PreparedSplit(self._files, self.manifest.splits[split].streams, split)

    def splits(self, data: DataConfig, *, seed: int) -> Splits:
        """The rows of a run: held out by ratio if configured, then mixed.
        Raises DataError: too few rows, or groups, to hold some out."""
        train, held_out, test = self.all_rows("train"), self.all_rows("eval"), self.all_rows("test")
        assert train is not None
        if data.eval_ratio or data.test_ratio:
            chosen = hold_out(train.keys, eval_ratio=data.eval_ratio, test_ratio=data.test_ratio, seed=seed)
            held_out = train.take(chosen.eval) if data.eval_ratio else held_out
            test = train.take(chosen.test) if data.test_ratio else test
            train = train.take(chosen.train)
        if data.mix:
            streams = train.streams[train.groups.starts[:-1]]
            available = np.bincount(streams, minlength=len(data.mix)).tolist()
            wanted = sizes_of_mix(available, [item.weight for item in data.mix], [item.count for item in data.mix])
            train = train.take(train.groups.rows(mixed(streams, wanted, seed=seed)))
        return Splits(train, held_out, test)
