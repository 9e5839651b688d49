"""Writing one part of a prepared dataset.

A part is written by whoever gets it, in any order and as often as needed: its files depend on the source and the config
alone. So the same bytes come from one process or from a cluster, and a preparation that was killed goes on where it
stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finray.data.dataset.manifest import BadRowNote, PartResult, RangeRows, RowCounts, part_note
from finray.data.dataset.plan import Part, Settings
from finray.data.dataset.writing import RowWriter, WrittenRow
from finray.data.formats.convert import column, converter_of
from finray.data.formats.examples import Example
from finray.data.sources.pieces import bad_row, read_piece
from finray.data.storage import Folder
from finray.data.tokenize.encode import Encoded, Tokenizer
from finray.errors import DataError

_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row was read: number of the piece in the part, number in the piece, position in the part."""

    piece: int
    number: int
    position: int


class PartWriter:
    """Writes parts.

    Args:
        settings: of the config.
        encoder: turns examples into tokens.
        folder: the prepared dataset in the making.
    """

    def __init__(self, settings: Settings, encoder: Tokenizer, folder: Folder) -> None:
        self._settings = settings
        self._encoder = encoder
        self._folder = folder

    def write(self, part: Part) -> PartResult:
        """Write the files of a part, then what is known of it, unless that is there already; returns the latter.

        Raises:
            DataError: a row is bad and `data.on_bad_row` is `error`, or storage fails.
        """
        note = part_note(part.stream.name, part.number)
        done = self._folder.read(note)
        if done is not None:
            finished = PartResult.from_json(json.loads(done))
            # What an interrupted preparation left may have been cut in another way.
            if finished.cut == _cut(part):
                return finished
        try:
            return self._write(part, note)
        except OSError as error:
            raise DataError(
                f"the prepared data set cannot be written: {error.strerror or error}", where=self._folder.root
            ) from None

    def _write(self, part: Part, note: str) -> PartResult:
        counts = RowCounts()
        passed = [0] * len(part.pieces)
        bad: list[BadRowNote] = []
        kind: str | None = None
        convert = converter_of(part.row_format, has_chat_template=self._encoder.has_chat_template)
        rows = self._rows(part, passed, bad)
        with RowWriter(self._folder.sub(part.stream.name), part.stem) as writer:
            while batch := list(islice(rows, _ROWS_AT_A_TIME)):
                for place, group, found in self._encode(part, batch, convert, bad):
                    for example, encoded in found:
                        kind = kind or type(example).__name__.lower()
                        _keep(writer, counts, place, group, encoded)
                    counts.source_rows += 1
                    counts.left_out += not found
            files = writer.finish()
        counts.source_rows += len(bad)
        counts.bad_rows = len(bad)
        result = PartResult(
            stream=part.stream.name,
            number=part.number,
            kind=kind,
            format=part.row_format.describe(),
            counts=counts,
            longest=writer.longest,
            labels=tuple(sorted(writer.labels)),
            files=files,
            cut=_cut(part),
            pieces=tuple(
                RangeRows(part.stream.source.short(piece.file), piece.first, rows)
                for piece, rows in zip(part.pieces, passed, strict=True)
            ),
            bad=tuple(bad),
        )
        self._folder.write(note, (json.dumps(result.to_json()) + "\n").encode())
        return result

    def _rows(self, part: Part, passed: list[int], bad: list[BadRowNote]) -> Iterator[tuple[_Place, dict[str, Any]]]:
        position = 0
        for index, piece in enumerate(part.pieces):

            def saw(number: int, index: int = index) -> None:
                passed[index] = number

            for item in read_piece(piece, part.stream.source, self._settings.reading, saw=saw):
                place = _Place(index, item.number, position)
                position += 1
                if isinstance(item.value, DataError):
                    self._refuse(part, place, item.value, bad)
                else:
                    yield place, item.value

    def _refuse(self, part: Part, place: _Place, row: DataError, bad: list[BadRowNote]) -> None:
        if self._settings.data.on_bad_row == "error":
            raise bad_row(row, part.pieces[place.piece], place.number, self._settings.reading)
        bad.append(BadRowNote(place.piece, place.number, row.message))

    def _encode(
        self,
        part: Part,
        batch: list[tuple[_Place, dict[str, Any]]],
        convert: Callable[[Mapping[str, Any]], list[Example]],
        bad: list[BadRowNote],
    ) -> Iterator[tuple[_Place, Any, list[tuple[Example, Encoded]]]]:
        """The rows of a batch with their examples; one by one where something is wrong, to name the row at fault."""
        group_by = self._settings.data.group_by

        def encode(
            some: list[tuple[_Place, dict[str, Any]]],
        ) -> list[tuple[_Place, Any, list[tuple[Example, Encoded]]]]:
            examples = [convert(row) for _, row in some]
            groups = [None if group_by is None else column(row, group_by) for _, row in some]
            encoded = iter(self._encoder.encode_noted([example for own in examples for example in own]))
            return [
                (place, group, [(example, next(encoded)) for example in own])
                for (place, _), group, own in zip(some, groups, examples, strict=True)
            ]

        try:
            yield from encode(batch)
        except DataError:
            for one in batch:
                try:
                    yield from encode([one])
                except DataError as error:
                    message = error.message if error.where is None else f"{error.message} ({error.where})"
                    self._refuse(part, one[0], DataError(message, repair=error.repair), bad)


def _cut(part: Part) -> list[list[Any]]:
    """Which ranges of which files a part is made of, as JSON types."""
    return [
        [part.stream.source.short(piece.file), piece.start, piece.stop, list(piece.keep) if piece.keep else None]
        for piece in part.pieces
    ]


def _keep(writer: RowWriter, counts: RowCounts, place: _Place, group: Any, encoded: Encoded) -> None:
    counts.dropped_too_long += encoded.dropped
    counts.dropped_tokens += encoded.dropped_tokens
    counts.truncated_tokens += encoded.truncated_tokens
    counts.answers_lost += encoded.answers_lost
    # Rows that lost their answer have their own counter.
    counts.unlearnable -= encoded.answers_lost
    if "split_conversations" in encoded.notes:
        counts.split_rows += len(encoded.rows)
        counts.split_tokens += sum(len(row.ids) for row in encoded.rows)
    for note in encoded.notes:
        setattr(counts, note, getattr(counts, note) + 1)
    for row in encoded.rows:
        counts.truncated += row.truncated
        if row.label is None and not row.supervised:
            counts.unlearnable += 1
            continue
        counts.rows += 1
        counts.tokens += len(row.ids)
        counts.supervised += row.supervised
        writer.add(WrittenRow(row, place.position, place.piece, place.number, group))
