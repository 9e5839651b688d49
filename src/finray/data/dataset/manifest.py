"""The manifest of a prepared dataset, and what its writers note of each part. docs/formats.md specifies both files.

What these types say in Python is read from JSON and written to it here alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from finray.data.dataset.plan import Stream, fingerprint
from finray.errors import DataError


@dataclass(slots=True)
class RowCounts:
    """What became of source rows; docs/formats.md has the meaning of each. The last five are counted by the encoder."""

    source_rows: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    answers_lost: int = 0
    dropped_too_long: int = 0
    dropped_tokens: int = 0
    unlearnable: int = 0
    left_out: int = 0
    bad_rows: int = 0
    split_rows: int = 0
    split_tokens: int = 0
    system_ignored: int = 0
    answers_rewritten: int = 0
    tools_as_text: int = 0
    empty_answers: int = 0
    split_conversations: int = 0

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RowCounts:
        """From an object that may hold other fields besides."""
        return cls(**{field.name: int(plain[field.name]) for field in fields(cls)})

    @classmethod
    def sum(cls, counts: Iterable[RowCounts]) -> RowCounts:
        """Of all parts."""
        total = cls()
        for one in counts:
            for field in fields(cls):
                setattr(total, field.name, getattr(total, field.name) + getattr(one, field.name))
        return total


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a prepared dataset: name in the folder of its stream, size, and SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RangeStart:
    """Where a range of a source file begins: after so many of its rows."""

    file: str
    first: int


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part: its rows, the source rows that they came from, and its two files."""

    rows: int
    source_rows: int
    pieces: tuple[RangeStart, ...]
    tokens: DataFile
    index: DataFile

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PartEntry:
        """From what ``asdict`` gives."""
        pieces = tuple(RangeStart(**piece) for piece in plain["pieces"])
        return cls(plain["rows"], plain["source_rows"], pieces, DataFile(**plain["tokens"]), DataFile(**plain["index"]))


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """The rows of one source for one split; ``name`` is its folder, ``format`` says how rows were read."""

    name: str
    format: str
    rows: int
    source_rows: int
    parts: tuple[PartEntry, ...]

    def files(self) -> list[tuple[str, DataFile]]:
        """Every data file with its path in the dataset, in the order of the rows."""
        return [(f"{self.name}/{file.name}", file) for part in self.parts for file in (part.tokens, part.index)]


@dataclass(frozen=True, slots=True)
class SplitStats:
    """One split.

    Attributes:
        counts: of all its parts.
        longest: tokens of the longest row.
        kind: ``chat``, ``completion``, ``text`` or ``labelled``; None without rows.
        labels: all classes, whole numbers first.
        streams: its sources.
    """

    counts: RowCounts
    longest: int
    kind: str | None
    labels: tuple[str, ...]
    streams: tuple[StreamEntry, ...]

    @property
    def parts(self) -> list[PartEntry]:
        """Of all streams, in the order of the rows."""
        return [part for stream in self.streams for part in stream.parts]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> SplitStats:
        """From what :meth:`to_json` gives."""
        streams = tuple(
            StreamEntry(
                one["name"],
                one["format"],
                one["rows"],
                one["source_rows"],
                tuple(PartEntry.from_json(part) for part in one["parts"]),
            )
            for one in plain["streams"]
        )
        return cls(RowCounts.from_json(plain), plain["longest"], plain["kind"], tuple(plain["labels"]), streams)

    def to_json(self) -> dict[str, Any]:
        """As in the manifest: the counts beside the other fields."""
        plain = asdict(self)
        return {**plain.pop("counts"), **plain}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a directory a prepared dataset.

    Attributes:
        fingerprint: the name of the directory.
        content: a digest of all rows.
        shaped_by: what the fingerprint covers, as JSON types.
        splits: by name.
    """

    fingerprint: str
    content: str
    shaped_by: Mapping[str, Any]
    splits: Mapping[str, SplitStats]

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """From the file.

        Raises:
            ValueError: it is not a manifest.
        """
        try:
            plain = json.loads(content)
            splits = {name: SplitStats.from_json(split) for name, split in plain["splits"].items()}
            return cls(str(plain["fingerprint"]), str(plain["content"]), plain["shaped_by"], splits)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a manifest") from error

    def to_bytes(self) -> bytes:
        """The file."""
        plain = {
            "fingerprint": self.fingerprint,
            "content": self.content,
            "shaped_by": self.shaped_by,
            "splits": {name: split.to_json() for name, split in self.splits.items()},
        }
        return (json.dumps(plain, indent=1) + "\n").encode()


# --- what is noted of a part ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeRows:
    """A range of a source file that was read: rows of the file before it, None where only counting can tell; and its
    own rows, blank ones included."""

    file: str
    first: int | None
    rows: int


@dataclass(frozen=True, slots=True)
class BadRowNote:
    """A row that was left out: number of its range in the part, number in the range, and the reason."""

    piece: int
    number: int
    message: str


@dataclass(frozen=True, slots=True)
class PartResult:
    """What is known of a part that was written.

    Attributes:
        stream: name of its stream.
        number: of the part in the stream.
        kind: of its first row; None without rows.
        format: how rows were read, for people.
        counts: of its rows.
        longest: tokens of the longest row.
        labels: classes in it.
        files: the two data files, as ``tokens`` and ``index``.
        cut: which ranges of which files it was made of, as JSON types.
        pieces: these ranges.
        bad: rows that were left out.
    """

    stream: str
    number: int
    kind: str | None
    format: str
    counts: RowCounts
    longest: int
    labels: tuple[str, ...]
    files: Mapping[str, DataFile]
    cut: list[list[Any]]
    pieces: tuple[RangeRows, ...]
    bad: tuple[BadRowNote, ...]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PartResult:
        """From what :meth:`to_json` gives."""
        return cls(
            plain["stream"],
            plain["number"],
            plain["kind"],
            plain["format"],
            RowCounts.from_json(plain["counts"]),
            plain["longest"],
            tuple(plain["labels"]),
            {role: DataFile(**file) for role, file in plain["files"].items()},
            plain["cut"],
            tuple(RangeRows(**piece) for piece in plain["pieces"]),
            tuple(BadRowNote(**row) for row in plain["bad"]),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def part_note(stream: str, number: int) -> str:
    """Path of what is noted of a part."""
    return f"{stream}/part-{number:05d}.json"


# --- from parts to the manifest -------------------------------------------------------------------------------------


def manifest_of(shape: Mapping[str, Any], streams: list[Stream], results: Sequence[PartResult]) -> Manifest:
    """The manifest of a prepared dataset, from what is known of its parts.

    Raises:
        DataError: a split has no token to learn.
    """
    splits: dict[str, SplitStats] = {}
    for name in dict.fromkeys(stream.split for stream in streams):
        own = [stream for stream in streams if stream.split == name]
        by_stream = [_numbered(stream, results) for stream in own]
        parts = [part for some in by_stream for part in some]
        stats = SplitStats(
            counts=RowCounts.sum(part.counts for part in parts),
            longest=max(part.longest for part in parts),
            kind=next((part.kind for part in parts if part.kind), None),
            labels=tuple(sorted({label for part in parts for label in part.labels}, key=_by_number_or_name)),
            streams=tuple(_stream_entry(stream, some) for stream, some in zip(own, by_stream, strict=True)),
        )
        _check_learnable(name, stats, own)
        splits[name] = stats
    return Manifest(fingerprint(shape), content_of(splits), dict(shape), splits)


def bad_rows(streams: list[Stream], results: Sequence[PartResult]) -> list[dict[str, Any]]:
    """Rows that were left out because they are bad: split, file, row and reason, in the order of the sources."""
    return [
        {
            "split": stream.split,
            "file": part.pieces[row.piece].file,
            "row": (part.pieces[row.piece].first or 0) + row.number,
            "message": row.message,
        }
        for stream in streams
        for part in _numbered(stream, results)
        for row in part.bad
    ]


def content_of(splits: Mapping[str, SplitStats]) -> str:
    """A digest of all rows: equal exactly when the files of all splits are."""
    digests = [
        [name, [file.sha256 for stream in splits[name].streams for _, file in stream.files()]]
        for name in sorted(splits)
    ]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _numbered(stream: Stream, results: Sequence[PartResult]) -> list[PartResult]:
    """The parts of a stream in order, with the rows of the file before each range filled in.

    That number is not known when a part is written, because the ranges before it may not be counted yet.
    """
    found: list[PartResult] = []
    file, passed = None, 0
    for part in sorted((one for one in results if one.stream == stream.name), key=lambda one: one.number):
        pieces = []
        for piece in part.pieces:
            if piece.file != file:
                file, passed = piece.file, 0
            first = passed if piece.first is None else piece.first
            pieces.append(replace(piece, first=first))
            passed = first + piece.rows
        found.append(replace(part, pieces=tuple(pieces)))
    return found


def _stream_entry(stream: Stream, parts: list[PartResult]) -> StreamEntry:
    entries = tuple(
        PartEntry(
            part.counts.rows,
            part.counts.source_rows,
            tuple(RangeStart(piece.file, piece.first or 0) for piece in part.pieces),
            part.files["tokens"],
            part.files["index"],
        )
        for part in parts
    )
    rows, source_rows = sum(part.rows for part in entries), sum(part.source_rows for part in entries)
    return StreamEntry(stream.name, parts[0].format, rows, source_rows, entries)


def _by_number_or_name(label: str) -> tuple[bool, int, str]:
    return (not label.isdigit(), int(label) if label.isdigit() else 0, label)


def _check_learnable(name: str, split: SplitStats, streams: list[Stream]) -> None:
    if split.counts.supervised or split.labels:
        return
    counts = split.counts
    reasons = [
        f"{count:,} {text}"
        for count, text in (
            (counts.answers_lost, "lost their answer to truncation"),
            (counts.dropped_too_long, "are longer than data.max_length"),
            (counts.bad_rows, "are bad"),
            (counts.unlearnable, "have nothing to learn"),
        )
        if count
    ]
    raise DataError(
        f"none of the {counts.source_rows} rows has a token to learn ({name}: {', '.join(reasons)})",
        where=streams[0].source.name,
        repair="check data.train_on, the roles of the messages, and data.max_length (answers may be cut off)",
    )
