"""Writes one part of a prepared dataset: reads, converts and tokenizes its rows, and writes two Arrow files.

Any process can write a part, in any order and as often as needed: its files depend only on the source and the config.
So one process and a cluster write the same bytes, and a killed preparation continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from finray.config.resolved import Problem
from finray.data.dataset.manifest import NAMED_ROWS, BadRowNote, DataFile, PartResult, files_of, part_note
from finray.data.dataset.plan import ROWS_PER_BATCH, Part, PrepareSettings
from finray.data.dataset.prepared import VALUE
from finray.data.formats.convert import column, converter_of
from finray.data.formats.examples import Chat, Example, RowFormat
from finray.data.formats.labels import Label, in_order, kind_of, mixed_labels
from finray.data.sources.pieces import bad_row, read_piece
from finray.data.storage import Folder
from finray.data.tokenize.encode import Encoded, Texts, Tokenizer, Tokens
from finray.data.tokenize.widths import joined_ids
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
# Type of the column `label` in the index.
LABEL_TYPES = {"single_label": pa.string(), "multi_label": pa.list_(pa.string()), "regression": pa.float64()}
_ROWS_AT_A_TIME = 256
# The next batch is begun before this one is written only if this one has at most so many characters.
_MOST_AHEAD = 4 * 2**20

Convert = Callable[[Mapping[str, Any]], list[Example]]


@dataclass(slots=True)
class _SourceRow:
    """A row of the source: number of its piece in the part, number in the piece, position in the part, and the group
    that must not be split."""

    piece: int
    number: int
    position: int
    value: dict[str, Any]
    group: Any = None


@dataclass(slots=True)
class _Batch:
    """Rows that are being tokenized, or the error that kept them from it."""

    rows: list[_SourceRow]
    examples: list[list[Example]] = field(default_factory=list)
    texts: Texts | None = None
    encodings: Future[tuple[list[Any], list[Any]]] = field(default_factory=Future)
    error: Exception | None = None


class PartWriter:
    """Writes parts.

    Args:
        settings: of the config.
        encoder: turns examples into tokens.
        folder: the unfinished prepared dataset.
    """

    def __init__(self, settings: PrepareSettings, encoder: Tokenizer, folder: Folder) -> None:
        self._settings = settings
        self._encoder = encoder
        self._folder = folder

    def write(self, part: Part, *, enough: Callable[[], bool] | None = None) -> PartResult:
        """Write the files of a part, then its result file, unless that exists; returns the result.

        Args:
            part: the part.
            enough: called while rows are left, after some were written; True leaves the others out.

        Raises:
            DataError: a row is bad and `data.on_bad_row` is `error`, or storage fails.
        """
        note = part_note(part.stream.name, part.number)
        pieces = tuple(replace(piece, file=part.stream.source.short(piece.file)) for piece in part.pieces)
        done = self._folder.read(note)
        if done is not None:
            # An interrupted preparation may have been another version's, or split differently.
            with suppress(DataError):
                finished = PartResult.from_bytes(done)
                if finished.pieces == pieces:
                    self._require_written(part.stream.name, finished)
                    return finished
        passed = [0] * len(pieces)
        bad: list[BadRowNote] = []
        convert = converter_of(part.row_format, has_chat_template=self._encoder.has_chat_template)
        rows = self._rows(part, passed, bad)
        try:
            doubles = self._encoder.doubles
            with closing(_ArrowFiles(self._folder.sub(part.stream.name), part.number, doubles)) as files:
                begin = partial(self._begin, convert=convert)
                for batch in _with_next(rows, begin, enough):
                    if batch is None:
                        # Ranges that were not reached are not ranges without rows.
                        reached = 1 + max(at for at, count in enumerate(passed) if count)
                        pieces, passed = pieces[:reached], passed[:reached]
                        break
                    for row, examples, encoded in self._encode_each(part, batch, begin, bad):
                        if part.row_format.system and part.row_format.kind != "alpaca":
                            files.counts["system_unused"] += sum(not isinstance(example, Chat) for example in examples)
                        try:
                            files.add(row, examples, encoded)
                        except DataError as error:
                            raise bad_row(error, part.pieces[row.piece], row.number, self._settings.reading) from None
                files.counts["source_rows"] += len(bad)
                files.counts["bad_rows"] = len(bad)
                tokens_file, index_file = files.finish()
            read, unread = _columns(part.row_format, files.columns, files.unread)
            result = PartResult(
                stream=part.stream.name,
                number=part.number,
                format=part.row_format.name(has_chat_template=self._encoder.has_chat_template),
                read=read,
                unread=unread,
                longest=files.longest,
                kind=files.kind,
                labels=(names := in_order(files.labels)),
                label_rows=tuple(files.labels[name] for name in names),
                problem=files.problem,
                tokens_file=tokens_file,
                index_file=index_file,
                pieces=pieces,
                passed=tuple(passed),
                bad=tuple(sorted(bad, key=lambda row: (row.piece, row.number))),
                lost=tuple(files.lost),
                cut=tuple(files.cut),
                places={name: tuple(rows) for name, rows in files.places.items()},
                ends=dict(files.ends),
                **files.counts,
            )
            self._folder.write(note, result.to_bytes())
        except OSError as error:
            raise DataError(
                f"the prepared dataset cannot be written: {error.strerror or error}", where=self._folder.root
            ) from None
        return result

    def _require_written(self, stream: str, part: PartResult) -> None:
        """Check that the files of a part from an earlier preparation exist and are intact."""
        for file in (part.tokens_file, part.index_file) if not self._folder.is_remote else ():
            path = Path(self._folder.sub(stream).at(file.name))
            files_of(self._folder).verify(path, size=file.bytes, sha256=file.sha256)

    def _rows(self, part: Part, passed: list[int], bad: list[BadRowNote]) -> Iterator[_SourceRow]:
        position = 0
        for index, piece in enumerate(part.pieces):

            def saw(number: int, index: int = index) -> None:
                passed[index] = number

            for number, value in read_piece(piece, part.stream.source, self._settings.reading, saw=saw):
                if isinstance(value, DataError):
                    self._refuse(part, index, number, value, bad)
                else:
                    yield _SourceRow(index, number, position, value)
                position += 1

    def _refuse(self, part: Part, piece: int, number: int, row: DataError, bad: list[BadRowNote]) -> None:
        if self._settings.data.on_bad_row == "error":
            raise bad_row(row, part.pieces[piece], number, self._settings.reading)
        bad.append(BadRowNote(piece, number, row.message))

    def _encode_each(
        self, part: Part, batch: _Batch, begin: Callable[[list[_SourceRow]], _Batch], bad: list[BadRowNote]
    ) -> Iterator[tuple[_SourceRow, list[Example], list[Encoded]]]:
        """Rows with their results; one by one after an error, to name the bad row."""
        try:
            yield from self._encoded(batch)
        except DataError:
            for row in batch.rows:
                try:
                    yield from self._encoded(begin([row]))
                except DataError as error:
                    message = error.message if error.where is None else f"{error.message} ({error.where})"
                    refusal = DataError(message, repair=error.repair)
                    if error.overdue:
                        # The next row would take as long: stop here.
                        late = bad_row(refusal, part.pieces[row.piece], row.number, self._settings.reading)
                        late.overdue = True
                        raise late from None
                    self._refuse(part, row.piece, row.number, refusal, bad)

    def _begin(self, rows: list[_SourceRow], *, convert: Convert) -> _Batch:
        """Have rows tokenized in a thread, in which Rust leaves Python to this one. A process that ends does not wait
        for it."""
        batch = _Batch(rows)
        try:
            batch.examples = [convert(row.value) for row in rows]
            if (group_by := self._settings.data.group_by) is not None:
                for row in rows:
                    row.group = column(row.value, group_by)
            batch.texts = self._encoder.texts([example for examples in batch.examples for example in examples])
        except Exception as error:
            # Its turn comes after that of the rows before it.
            batch.error = error
        else:
            threading.Thread(target=self._tokenize, args=(batch,), name="finray-tokenize", daemon=True).start()
        return batch

    def _tokenize(self, batch: _Batch) -> None:
        assert batch.texts is not None
        try:
            batch.encodings.set_result(self._encoder.tokenize(batch.texts))
        except BaseException as error:
            # Raised where the result is wanted.
            batch.encodings.set_exception(error)

    def _encoded(self, batch: _Batch) -> list[tuple[_SourceRow, list[Example], list[Encoded]]]:
        if batch.error is not None:
            raise batch.error
        assert batch.texts is not None
        encoded = iter(self._encoder.rows(batch.texts, batch.encodings.result()))
        # They are large, and the next ones wait.
        batch.encodings = Future()
        each = zip(batch.rows, batch.examples, strict=True)
        return [(row, examples, list(islice(encoded, len(examples)))) for row, examples in each]


def _with_next(
    rows: Iterator[_SourceRow], begin: Callable[[list[_SourceRow]], _Batch], enough: Callable[[], bool] | None
) -> Iterator[_Batch | None]:
    """Rows in batches that were begun, each after the next one was begun too, so that two cores are busy.

    With ``enough``, which is asked before each batch but the first, there is no next one, and None is the end.
    """
    before: _Batch | None = None
    has_begun = False
    try:
        while some := list(islice(rows, _ROWS_AT_A_TIME)):
            if enough is not None and has_begun and enough():
                yield None
                return
            batch, has_begun = begin(some), True
            if before is not None:
                yield before
            before = batch
            # Encodings take some 80 bytes per token.
            if enough is not None or (batch.texts is not None and batch.texts.characters > _MOST_AHEAD):
                yield batch
                before = None
    except DataError:
        # A row that cannot be read is named after the bad ones before it.
        if before is not None:
            yield before
        raise
    if before is not None:
        yield before


def _columns(
    row_format: RowFormat, columns: Mapping[tuple[str, ...], int], noted: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """What is read of the columns, and what is not, with the number of rows.

    Args:
        row_format: of the rows.
        columns: number of rows by the columns in which they have something.
        noted: number of rows by what was not read of them.
    """
    first, others = row_format.used(row_format.present)
    read, unread, filled = dict.fromkeys(first), dict.fromkeys(others, 0), Counter[str]()
    for names, rows in columns.items():
        more, others = row_format.used(names)
        read |= dict.fromkeys(more)
        unread |= {name: unread.get(name, 0) + rows for name in others}
        filled.update(dict.fromkeys(names, rows))
    # A column that is read of some rows only.
    never = {name for name, rows in noted.items() if rows == filled[name]}
    kept = tuple(column for column in read if column.rpartition(" from ")[2] not in never)
    return kept, unread | {name: unread.get(name, 0) + rows for name, rows in noted.items()}


class _ArrowFiles:
    """The two files of a part, ``tokens-NUMBER.arrow`` and ``index-NUMBER.arrow``, and statistics of its rows.

    Attributes:
        counts: names and values of :class:`RowCounts`.
        kind: kind of the first example.
        longest: tokens of the longest row.
        labels: rows of each class.
        problem: problem type of the labels; None without labels.
        lost: piece and number of the first rows whose whole answer was truncated.
        cut: likewise of truncated rows.
        places: likewise of rows that a counter counts.
        columns: number of rows by the columns in which they have something.
        unread: number of rows by what was not read of them.
        ends: special tokens other than EOS that end what is learned.
    """

    def __init__(self, folder: Folder, number: int, doubles: tuple[int, int, Mapping[int, str]]) -> None:
        self._folder = folder
        self._names = (f"tokens-{number:05d}.arrow", f"index-{number:05d}.arrow")
        self._scratch = folder.scratch(self._names[0])
        self._sink = pa.OSFile(str(self._scratch), "wb")
        self._tokens = pa.ipc.new_file(self._sink, TOKENS)
        self._index: list[pa.RecordBatch] = []
        # Rows with their number of targets, and whether they are in the group of the row before.
        self._waiting: list[tuple[_SourceRow, Tokens, int, bool]] = []
        self._has_groups = False
        self.counts: Counter[str] = Counter()
        self.kind: str | None = None
        self.longest = 0
        self.labels: Counter[str] = Counter()
        self.problem: Problem | None = None
        self.lost: list[tuple[int, int]] = []
        self.cut: list[tuple[int, int]] = []
        self.places: dict[str, list[tuple[int, int]]] = {}
        self.columns: Counter[tuple[str, ...]] = Counter()
        self.unread: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self._bos, self._eos, self._specials = doubles
        self._special = np.array(sorted(self._specials), dtype=np.int32)

    def close(self) -> None:
        """Remove unfinished files."""
        self._sink.close()
        self._scratch.unlink(missing_ok=True)

    def add(self, row: _SourceRow, examples: list[Example], encoded: list[Encoded]) -> None:
        """Add the result of a source row, without rows that have no targets."""
        counts = self.counts
        counts["source_rows"] += 1
        counts["left_out"] += not examples
        # Without those that are null or empty.
        self.columns[tuple([name for name, value in row.value.items() if value or value == 0])] += 1
        for example, result in zip(examples, encoded, strict=True):
            self.kind = self.kind or type(example).__name__.lower()
            # Sets have another order in each process.
            for note in sorted(result.notes):
                if note.startswith("unread:"):
                    self.unread[note.removeprefix("unread:")] += 1
                else:
                    self._note(note, row)
            if result.dropped or result.truncated_tokens or result.answers_lost:
                counts["dropped_too_long"] += result.dropped
                counts["dropped_tokens"] += result.dropped_tokens
                counts["truncated_tokens"] += result.truncated_tokens
                counts["answers_lost"] += result.answers_lost
                if result.answers_lost and len(self.lost) < NAMED_ROWS:
                    self.lost.append((row.piece, row.number))
                # Rows whose answer was truncated have a separate counter.
                counts["unlearnable"] -= result.answers_lost
            if "split_conversations" in result.notes:
                counts["split_rows"] += len(result.rows)
                counts["split_tokens"] += sum(len(tokens.ids) for tokens in result.rows)
            self._has_groups |= result.together
            # What becomes of a group is counted once: if it lacks a row it is none.
            for group in [result.rows] if result.together else [[tokens] for tokens in result.rows]:
                if any(tokens.truncated for tokens in group):
                    counts["truncated"] += 1
                    if len(self.cut) < NAMED_ROWS:
                        self.cut.append((row.piece, row.number))
                if any(tokens.label is None and not tokens.supervised for tokens in group):
                    counts["unlearnable"] += bool(group)
                    continue
                for place, tokens in enumerate(group):
                    counts["rows"] += 1
                    counts["tokens"] += len(tokens.ids)
                    counts["supervised"] += tokens.supervised
                    if tokens.label is not None:
                        self._require_like_the_first(tokens.label)
                    self._waiting.append((row, tokens, tokens.supervised, place > 0))
                    if len(self._waiting) == ROWS_PER_BATCH:
                        self._flush()

    def _note(self, name: str, row: _SourceRow) -> None:
        self.counts[name] += 1
        places = self.places.setdefault(name, [])
        if len(places) < NAMED_ROWS:
            places.append((row.piece, row.number))

    def _require_like_the_first(self, label: Label) -> None:
        kind = kind_of(label)
        self.problem = self.problem or kind
        if kind != self.problem:
            raise mixed_labels(self.problem, kind, label)

    def finish(self) -> tuple[DataFile, DataFile]:
        """Move both files into place, and describe them."""
        self._flush()
        self._tokens.close()
        self._sink.close()
        batches = self._index or [pa.record_batch([_array([], field.type) for field in INDEX], schema=INDEX)]
        index = pa.BufferOutputStream()
        with pa.ipc.new_file(index, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        content = index.getvalue().to_pybytes()
        tokens_name, index_name = self._names
        with self._scratch.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        tokens_file = DataFile(tokens_name, self._scratch.stat().st_size, digest)
        self._folder.adopt(self._scratch, tokens_name)
        self._folder.write(index_name, content)
        return tokens_file, DataFile(index_name, len(content), hashlib.sha256(content).hexdigest())

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        lengths = np.fromiter((len(tokens.ids) for _, tokens, *_ in waiting), dtype=np.int32, count=len(waiting))
        offsets = np.zeros(len(waiting) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        ids = joined_ids([tokens.ids for _, tokens, *_ in waiting])
        content, mask = ids.data.cast("B"), np.zeros(len(ids), dtype=np.uint8)
        bounds = list(pairwise(offsets.tolist()))
        for (_, tokens, *_), (start, stop) in zip(waiting, bounds, strict=True):
            if tokens.token_types:
                mask[start:stop] = tokens.token_types
            for low, high in tokens.spans:
                mask[start + low : start + high] = 1
        self._look_for_doubles(waiting, ids, mask, offsets)
        lists = [
            pa.ListArray.from_arrays(_array(offsets, pa.int32()), _array(values, field.type.value_type))
            for values, field in zip((ids, mask), TOKENS, strict=True)
        ]
        self._tokens.write_batch(pa.record_batch(lists, schema=TOKENS))
        self.longest = max(self.longest, int(lengths.max()))
        columns: dict[str, Any] = {
            "length": lengths,
            "supervised": [supervised for _, _, supervised, _ in waiting],
            "source_row": [row.position for row, *_ in waiting],
            "piece": [row.piece for row, *_ in waiting],
            "number": [row.number for row, *_ in waiting],
            "digest": [_hash64(content[4 * start : 4 * stop]) for start, stop in bounds],
        }
        schema = INDEX
        first, values = waiting[0][0], waiting[0][1].values
        if first.group is not None:
            groups = (json.dumps(row.group, sort_keys=True, default=str) for row, *_ in waiting)
            columns["group"] = [_hash64(group.encode()) for group in groups]
            schema = schema.append(pa.field("group", pa.int64()))
        if self._has_groups:
            columns["follows"] = [follows for *_, follows in waiting]
            schema = schema.append(pa.field("follows", pa.int8()))
        for name in values:
            columns[f"{VALUE}{name}"] = [float(tokens.values[name]) for _, tokens, *_ in waiting]
            schema = schema.append(pa.field(f"{VALUE}{name}", pa.float64()))
        if self.problem is not None:
            columns["label"] = [tokens.label for _, tokens, *_ in waiting]
            for label in columns["label"] if self.problem != "regression" else ():
                self.labels.update((label,) if isinstance(label, str) else label)
            schema = schema.append(pa.field("label", LABEL_TYPES[self.problem]))
        self._index.append(
            pa.record_batch([_array(columns[field.name], field.type) for field in schema], schema=schema)
        )

    def _look_for_doubles(
        self, waiting: list[tuple[_SourceRow, Tokens, int, bool]], ids: Any, mask: Any, offsets: Any
    ) -> None:
        """Count rows that begin with BOS twice, and those in which EOS, or the token that ends what is learned, occurs
        twice in a row; and these tokens. Labelled text has token types in the mask, and is not generated."""
        if not len(ids) or waiting[0][1].label is not None:
            return
        next_mask = np.append(mask[1:], 0)
        next_mask[offsets[1:] - 1] = 0
        last = ids[np.flatnonzero(mask > next_mask)]
        last = last[np.isin(last, self._special) & (last != self._eos)]
        for token, count in zip(*(found.tolist() for found in np.unique(last, return_counts=True)), strict=True):
            self.ends[f"{token} {self._specials[token]}"] += count
        same = np.flatnonzero(ids[1:] == ids[:-1])
        same = same[np.isin(ids[same], self._special)]
        # The second of them is in the same row.
        rows = np.searchsorted(offsets, same + 1, side="right") - 1
        same, rows = same[(inside := offsets[rows] <= same)], rows[inside]
        if not len(same):
            return
        begins = (ids[same] == self._bos) & (offsets[rows] == same)
        ends = ~begins & ((ids[same] == self._eos) | (mask[same] == 1))
        for name, found in (("doubled_bos", begins), ("doubled_eos", ends)):
            for at in np.unique(rows[found]).tolist():
                self._note(name, waiting[at][0])


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """A column; numbers without `pa.array`, which imports pandas if it is installed."""
    if not pa.types.is_integer(kind):
        return pa.array(values, kind)
    numbers = np.asarray(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _hash64(content: bytes | memoryview) -> int:
    """A signed 64-bit hash: the first eight bytes of BLAKE2b, little-endian."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
