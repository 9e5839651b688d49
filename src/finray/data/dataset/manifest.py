"""The manifest of a prepared dataset, and the note of a part that it is made from. docs/formats.md specifies the files.

Both are JSON of the types below, field by field.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from finray.config.resolved import Problem
from finray.data.dataset.plan import FORMAT_VERSION, Stream, fingerprint
from finray.data.formats.examples import described
from finray.data.formats.labels import in_order, mixed_labels
from finray.data.sources.readers import ByteRange
from finray.data.storage import Folder
from finray.errors import DataError
from finray.files import FileKind, sealed

MANIFEST = "manifest.json"
# Of rows that lost something, so many are named.
NAMED_ROWS = 3


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What became of source rows; docs/formats.md has the meaning of each. Those from ``system_ignored`` on are notes
    of converters, of the encoder and of the writer."""

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
    system_unused: int = 0
    split_rows: int = 0
    split_tokens: int = 0
    system_ignored: int = 0
    answers_rewritten: int = 0
    tools_as_text: int = 0
    empty_answers: int = 0
    joined_words: int = 0
    split_conversations: int = 0
    calls_left_out: int = 0
    open_answers: int = 0
    numbers_as_text: int = 0
    unwanted_answers: int = 0
    special_in_prompts: int = 0
    doubled_bos: int = 0
    doubled_eos: int = 0
    partly_learned: int = 0
    unpaired_tags: int = 0
    equal_answers: int = 0
    inverted_margins: int = 0

    def counts(self) -> dict[str, int]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(RowCounts)}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a prepared dataset: name in the folder of its stream, size, and SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BadRowNote:
    """A row that was left out: number of its range in the part, number in the range, and the reason."""

    piece: int
    number: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult(RowCounts):
    """What is known of a part that was written, and noted beside it until the dataset is whole."""

    stream: str  # name of its stream
    number: int  # of the part in the stream
    format: str  # of its rows, for people
    read: tuple[str, ...]  # fields that were read, and from which columns
    # Columns and keys of messages that were not read, with the number of rows that have something there.
    unread: Mapping[str, int]
    longest: int  # tokens of the longest row
    kind: str | None  # of its first row; None without rows
    labels: tuple[str, ...]  # classes in it
    tokens_file: DataFile  # with the token ids and masks
    index_file: DataFile  # with where each row lies and where it came from
    # The ranges of source files that it was made of, each with the file's name inside the source.
    pieces: tuple[ByteRange, ...]
    passed: tuple[int, ...]  # rows of each range, blank ones included
    bad: tuple[BadRowNote, ...]  # rows that were left out
    # The first rows that lost their whole answer: number of the range, and number in it.
    lost: tuple[tuple[int, int], ...] = ()
    problem: Problem | None = None  # that its labels speak for; None without labels
    label_rows: tuple[int, ...] = ()  # rows of each of ``labels``
    cut: tuple[tuple[int, int], ...] = ()  # likewise the first that were cut off
    # Likewise the first that a counter counts.
    places: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    # Special tokens other than EOS that end what is learned, as `ID TEXT`, and how often.
    ends: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, content: bytes) -> PartResult:
        """From the file. Raises DataError: it is no such file, another version's, or was changed."""
        return FileKind(DataError).unsealed(content, cls, "the note of a part")

    def to_bytes(self) -> bytes:
        """The file."""
        return (json.dumps(sealed(_plain(self))) + "\n").encode()


@dataclass(frozen=True, slots=True)
class RangeStart:
    """Where a range of a source file begins: after so many of its rows."""

    file: str
    first: int


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part: its rows, the source rows that they came from, its two files, and the kind of its first row."""

    rows: int
    source_rows: int
    pieces: tuple[RangeStart, ...]
    tokens: DataFile
    index: DataFile
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """The rows of one source for one split; ``name`` is its folder, ``format`` says how rows were read, and ``unread``
    in how many rows a column, or a key of messages, has something that was not read."""

    name: str
    format: str
    rows: int
    source_rows: int
    parts: tuple[PartEntry, ...]
    unread: Mapping[str, int] = field(default_factory=dict)

    def files(self) -> list[tuple[str, DataFile]]:
        """Every data file with its path in the dataset, in the order of the rows."""
        return [(f"{self.name}/{file.name}", file) for part in self.parts for file in (part.tokens, part.index)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStats(RowCounts):
    """One split."""

    longest: int  # tokens of the longest row
    kind: str | None  # of the first row: ``chat``, ``completion``, ``text`` or ``labelled``; None without rows
    labels: tuple[str, ...]  # all classes, in the order of their ids
    streams: tuple[StreamEntry, ...]  # its sources
    answers_lost_at: tuple[str, ...] = ()  # the first rows that lost their whole answer, as ``file:row``
    problem: Problem | None = None  # what the labels speak for; None without labels
    label_rows: tuple[int, ...] = ()  # rows of each of ``labels``
    truncated_at: tuple[str, ...] = ()  # likewise the first that were cut off
    empty_files: tuple[str, ...] = ()  # source files without rows
    # Of other counters, likewise the first rows of each.
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Special tokens other than EOS that end what is learned, as `ID TEXT`, and how often.
    ends: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> list[PartEntry]:
        """Of all streams, in the order of the rows."""
        return [part for stream in self.streams for part in stream.parts]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a directory a prepared dataset."""

    fingerprint: str  # the name of the directory
    content: str  # a digest of all rows
    shaped_by: Mapping[str, Any]  # what the fingerprint covers, as JSON types
    splits: Mapping[str, SplitStats]  # by name

    @classmethod
    def from_bytes(cls, content: bytes, folder: Folder) -> Manifest:
        """From the file. Raises DataError: it is not a manifest, or was changed after it was written."""
        kind, where = files_of(folder), folder.at(MANIFEST)
        plain = kind.parsed(content, dict[str, Any], where)
        shape = plain.get("shaped_by")
        version = shape.get("format_version", FORMAT_VERSION) if isinstance(shape, dict) else FORMAT_VERSION
        if version != FORMAT_VERSION:
            raise kind.refused(f"has format version {version}; this finray reads {FORMAT_VERSION}", where)
        # Those of older versions have no seal; their digests must fit each other at least.
        is_older = plain.keys() == {field.name for field in fields(cls)}
        manifest = kind.parsed(content, cls, where) if is_older else kind.unsealed(content, cls, where)
        if (manifest.fingerprint, manifest.content) != (fingerprint(manifest.shaped_by), content_of(manifest.splits)):
            raise kind.refused("was changed after it was written", where)
        for split in manifest.splits.values():
            for name, _ in (file for stream in split.streams for file in stream.files()):
                # Files behind a URL are copied to paths of these names.
                kind.inside(Path(), name, where=where)
        return manifest

    def to_bytes(self) -> bytes:
        """The file."""
        return (json.dumps(sealed(_plain(self)), indent=1) + "\n").encode()


def _plain(of: PartResult | Manifest) -> dict[str, Any]:
    """As JSON types, which a seal is of."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(of)))
    return plain


def files_of(folder: Folder) -> FileKind:
    """How the files of a prepared dataset are read."""
    return FileKind(DataError, repair=f"delete {folder.root} and run the command again")


def part_note(stream: str, number: int) -> str:
    """Path of what is noted of a part."""
    return f"{stream}/part-{number:05d}.json"


# --- from parts to the manifest -------------------------------------------------------------------------------------


def manifest_of(shape: Mapping[str, Any], streams: Sequence[Stream], results: Sequence[PartResult]) -> Manifest:
    """The manifest of a prepared dataset, from what is known of its parts.
    Raises DataError: a split has no token to learn, or only some of the rows have a label, or labels are of two
    kinds."""
    splits: dict[str, SplitStats] = {}
    kinds: dict[Problem, str] = {}
    some = [part for part in results if part.rows]
    if odd := next((part for part in some if (part.problem is None) != (some[0].problem is None)), None):
        raise DataError("a dataset cannot mix rows with a label and rows without one", where=odd.pieces[0].file)
    for name in dict.fromkeys(stream.split for stream in streams):
        own_streams = [stream for stream in streams if stream.split == name]
        parts = [part for stream in own_streams for part in _parts_of(stream.name, results)]
        each = [part.counts() for part in parts]
        counts = {counter: sum(part_counts[counter] for part_counts in each) for counter in each[0]}
        classes = dict.fromkeys(
            name for stream in own_streams if (rules := stream.choice.labels) for name in rules.names
        )
        of_class: Counter[str] = Counter()
        for part in parts:
            of_class.update(dict(zip(part.labels, part.label_rows, strict=True)))
        labels = tuple(classes) or in_order(of_class)
        for part in parts:
            if part.problem is not None:
                kinds.setdefault(part.problem, part.pieces[0].file)
        if len(kinds) > 1:
            (first, _), (other, file), *_ = kinds.items()
            error = mixed_labels(first, other)
            raise DataError(error.message, where=file, repair=error.repair)
        streams_of = tuple(_stream_entry(_parts_of(stream.name, results)) for stream in own_streams)
        entries = [entry for stream in streams_of for entry in stream.parts]
        named: dict[str, list[str]] = {}
        for entry, part in zip(entries, parts, strict=True):
            for which, rows in {"lost": part.lost, "cut": part.cut, **part.places}.items():
                found = (f"{entry.pieces[piece].file}:{entry.pieces[piece].first + number}" for piece, number in rows)
                named[which] = [*named.get(which, ()), *found][:NAMED_ROWS]
        places = {which: tuple(rows) for which, rows in named.items() if rows}
        rows_of = Counter[str]()
        for part in parts:
            for piece, passed in zip(part.pieces, part.passed, strict=True):
                rows_of[piece.file] += passed
        split = splits[name] = SplitStats(
            **counts,
            longest=max(part.longest for part in parts),
            kind=next((part.kind for part in parts if part.kind), None),
            labels=labels,
            label_rows=tuple(of_class[name] for name in labels),
            problem=next((part.problem for part in parts if part.problem), None),
            streams=streams_of,
            answers_lost_at=places.pop("lost", ()),
            truncated_at=places.pop("cut", ()),
            places=places,
            ends=dict(sum((Counter(part.ends) for part in parts), Counter[str]())),
            empty_files=tuple(file for file, count in rows_of.items() if not count),
        )
        if not split.supervised:
            reasons = (
                (split.answers_lost, "lost their answer to truncation"),
                (split.dropped_too_long, "are longer than data.max_length"),
                (split.bad_rows, "are bad"),
                (split.left_out, "were left out by the converter"),
                (split.unlearnable, "have nothing to learn"),
            )
            why = ", ".join(f"{count:,} {text}" for count, text in reasons if count)
            raise DataError(
                f"none of the {split.source_rows} rows has a token to train on ({name}: {why or 'they are empty'})",
                where=own_streams[0].source.name,
                repair="the converter must return rows"
                if split.left_out == split.source_rows
                else "check data.train_on, the roles of the messages, and data.max_length (answers may be cut off)",
            )
    return Manifest(fingerprint(shape), content_of(splits), dict(shape), splits)


def _parts_of(stream: str, results: Sequence[PartResult]) -> list[PartResult]:
    return sorted((part for part in results if part.stream == stream), key=lambda part: part.number)


def _stream_entry(parts: list[PartResult]) -> StreamEntry:
    entries: list[PartEntry] = []
    file, before = None, 0
    for part in parts:
        starts = []
        for piece, passed in zip(part.pieces, part.passed, strict=True):
            # The rows of a file before a range are not known when its part is written: the ranges before it may not be
            # counted yet.
            before = before if piece.file == file else 0
            first = before if piece.first is None else piece.first
            starts.append(RangeStart(piece.file, first))
            file, before = piece.file, first + passed
        files = part.tokens_file, part.index_file
        entries.append(PartEntry(part.rows, part.source_rows, tuple(starts), *files, part.kind))
    rows, source_rows = sum(part.rows for part in parts), sum(part.source_rows for part in parts)
    unread = Counter[str]()
    for part in parts:
        unread.update(part.unread)
    read = dict.fromkeys(field for part in parts for field in part.read)
    form = described(parts[0].format, read, unread)
    return StreamEntry(parts[0].stream, form, rows, source_rows, tuple(entries), dict(unread))


def bad_rows(manifest: Manifest, results: Sequence[PartResult]) -> list[dict[str, Any]]:
    """Rows that were left out because they are bad: split, file, row and reason, in the order of the sources."""
    return [
        {
            "split": name,
            "file": entry.pieces[row.piece].file,
            "row": entry.pieces[row.piece].first + row.number,
            "message": row.message,
        }
        for name, split in manifest.splits.items()
        for stream in split.streams
        for entry, part in zip(stream.parts, _parts_of(stream.name, results), strict=True)
        for row in part.bad
    ]


def content_of(splits: Mapping[str, SplitStats]) -> str:
    """A digest of all rows: equal exactly when the files of all splits are."""
    digests = [
        [name, [file.sha256 for stream in splits[name].streams for _, file in stream.files()]]
        for name in sorted(splits)
    ]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
