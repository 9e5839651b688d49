"""Plans a prepared dataset from its sources: what it depends on, and its parts.

``parts.py`` writes a part, ``manifest.py`` assembles the dataset.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from finray.config.objectives import spec_of
from finray.config.paths import is_template
from finray.config.redact import is_secret_name
from finray.config.schema import Config, DataConfig, ModelConfig
from finray.config.trust import require_trusted
from finray.data.formats.convert import FormatChoice
from finray.data.formats.examples import PreferenceKind, RowFormat
from finray.data.formats.labels import LabelRules
from finray.data.sources import hub
from finray.data.sources.features import class_names, features_of
from finray.data.sources.pieces import bad_row, count_rows, plan_parts, read_piece
from finray.data.sources.readers import TABLE_KINDS, TABLE_SUFFIXES, ByteRange, Reading
from finray.data.sources.resolve import Source, held_out_by_name, listed, resolve, unread
from finray.data.storage import Digests, file_suffix
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from finray.pretrained.tokenizers import generation_stops, load_tokenizer, tokenizer_files

FORMAT_VERSION = 2
# Size of a record batch of tokens; only the last in a file has fewer.
ROWS_PER_BATCH = 1024
_ROWS_THAT_DECIDE = 100
_USES = {"train": "training", "eval": "evaluation", "test": "the test"}


@dataclass(frozen=True, slots=True)
class Stream:
    """The rows of one source for one split."""

    name: str  # of its folder: the split, with a number if several sources are mixed
    split: str  # ``train``, ``eval`` or ``test``
    source: Source  # where rows come from
    choice: FormatChoice  # the user's settings of the format


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of work: some pieces of a stream's source, and the format of its rows."""

    stream: Stream
    number: int
    pieces: tuple[ByteRange, ...]
    row_format: RowFormat


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """The settings of a config that change tokens, besides sources and tokenizer."""

    data: DataConfig
    model: ModelConfig
    reading: Reading
    chunk_overlap: int
    labels: LabelRules | None = None
    preferences: PreferenceKind | None = None  # what the objective learns from, if that is no single answer

    @classmethod
    def of(cls, config: Config) -> PrepareSettings:
        """From a config, whose objective says what it learns from."""
        require_trusted(config, "train.objective")
        prepare = config.prepare
        reading = Reading(max_row_bytes=prepare.max_row_bytes, text_rows=prepare.text_rows)
        kinds: tuple[PreferenceKind, ...] = ("preference", "unpaired")
        preferences = next((kind for kind in kinds if kind in spec_of(config).rows), None)
        labels = LabelRules.of(config)
        return cls(config.data, config.model, reading, prepare.chunk_overlap, labels, preferences)

    def encoder(self, tokenizer: Any) -> Tokenizer:
        """The tokenizer with the config's settings."""
        data = self.data
        return Tokenizer(
            tokenizer,
            train_on=data.train_on,
            max_length=data.max_length,
            on_too_long=data.on_too_long,
            chunk_overlap=self.chunk_overlap,
            template_arguments=self.model.chat_template_arguments,
            tool_format=data.tool_format,
            stops=generation_stops(self.model),
        )


def plan_streams(settings: PrepareSettings) -> list[Stream]:
    """The sources of a config, by split (ratio splits are made later, from the training rows).
    Raises DataError: a source is missing, or evaluation would see the training rows."""
    data, streams = settings.data, _streams(settings)
    # A directory without named splits gives its files for every split name.
    for later, earlier in ((later, earlier) for at, later in enumerate(streams) for earlier in streams[:at]):
        if later.split != earlier.split and _share_rows(later.source, earlier.source, settings.reading):
            raise DataError(
                f"{_USES[later.split]} would use rows of {_USES[earlier.split]}: both are read from the same source",
                where="data.eval_source" if data.eval_source is not None else f"data.{later.split}_split",
                repair="set data.eval_source to other rows, or hold some out with data.eval_ratio",
            )
    return streams


def remarks_on_files(config: Config) -> list[str]:
    """Lines about the files of a config's sources: warnings, and what is not read of a directory.
    Raises DataError: a source is missing."""
    streams = _streams(PrepareSettings.of(config))
    held_out = {
        item.name: held_out_by_name(item.source) for item in streams if item.split == "train" and item.source.is_files
    }
    warnings = [
        f"warning: {name}: trained on, but by name to be held out: {listed(map(posixpath.basename, files))}; begin the "
        "names of the other files with `train`, or give only them as the source"
        for name, files in held_out.items()
        if files
    ]
    return [*warnings, *unread(stream.source for stream in streams)]


def _streams(settings: PrepareSettings) -> list[Stream]:
    data = settings.data
    learned: dict[str, Any] = {"labels": settings.labels, "preferences": settings.preferences}
    choice = FormatChoice.of(data, **learned)
    if data.mix:
        streams = []
        for number, item in enumerate(data.mix):
            split = item.split or data.train_split
            source = resolve(item.source, split=split, subset=item.subset, revision=item.revision)
            streams.append(Stream(f"train-{number}", "train", source, FormatChoice.of(data, item, **learned)))
    else:
        streams = [Stream("train", "train", _own(data, data.train_split), choice)]
    if data.eval_source is not None:
        held_out = resolve(data.eval_source, split=data.eval_split or "validation")
        streams.append(Stream("eval", "eval", held_out, choice))
    elif data.eval_split is not None:
        streams.append(Stream("eval", "eval", _own(data, data.eval_split), choice))
    if data.test_split is not None:
        streams.append(Stream("test", "test", _own(data, data.test_split), choice))
    return streams


def with_class_names(streams: list[Stream]) -> list[Stream]:
    """The streams, with the class names (``ClassLabel``) of their sources if the config has none.

    Integers are ids into the names of their own source; if it has none, into those of the first source that has some.
    Raises DataError: a source cannot be opened.
    """
    names_of = {stream.name: _class_names(stream) for stream in streams}
    first = next(filter(None, names_of.values()), ())
    named = []
    for stream in streams:
        rules = stream.choice.labels
        if first and rules is not None:
            names = rules.names or names_of[stream.name] or first
            stream = replace(stream, choice=replace(stream.choice, labels=replace(rules, names=names)))
        named.append(stream)
    return named


def _class_names(stream: Stream) -> tuple[str, ...]:
    choice = stream.choice
    if choice.labels is None or choice.labels.names or choice.labels.problem == "regression":
        return ()
    features, column = features_of(stream.source), ""
    # Unsuitable columns are reported when rows are read.
    with suppress(DataError):
        column = choice.decide(features).columns.get("label", "") if features else ""
    return class_names(features.get(column))


def _own(data: DataConfig, split: str) -> Source:
    if data.source is None:
        raise DataError(
            f"the split `{split}` has no source",
            where="data.source",
            repair="with data.mix, set data.eval_source or data.eval_ratio",
        )
    return resolve(data.source, split=split, subset=data.subset, revision=data.revision)


def _share_rows(first: Source, other: Source, reading: Reading) -> bool:
    """Whether two sources read the same rows. Files are compared, not rows; `finray inspect` counts rows that two files
    share."""
    if not first.is_files and not other.is_files:
        return first.name == other.name and hub.share_rows(first, other)
    if not set(first.files) & set(other.files):
        return False
    if first.slice is None or other.slice is None or first.files != other.files:
        return True
    rows = count_rows(first, reading)
    (start, stop), (begin, end) = first.slice.of(rows), other.slice.of(rows)
    return max(start, begin) < min(stop, end)


def shaped_by(settings: PrepareSettings, streams: list[Stream], *, tokenizer: str, digests: Digests) -> dict[str, Any]:
    """Everything that a prepared dataset depends on, as stored in its manifest.

    Args:
        settings: of the config.
        streams: its sources.
        tokenizer: digest of the tokenizer.
        digests: cache of file digests.
    """
    data = settings.data
    # How answers end, and how they continue a prompt that has opened their reasoning, changed with 3.
    stops = sorted(generation_stops(settings.model)) if settings.labels is None else []
    read: dict[str, Any] = {"reading": 3 if settings.labels is None else 2, **({"stops": stops} if stops else {})}
    described = []
    for stream in streams:
        source = stream.source
        if source.is_files:
            files = [[source.short(file), digests.of(file)] for file in source.files]
            content = _sha256(files)
        else:
            content = hub.digest(source, digests)
        cut = None if source.slice is None else asdict(source.slice)
        # The tokens of tool calls changed when null fields of records began to be left out.
        of_table = not source.is_files or any(file_suffix(file) in TABLE_SUFFIXES for file in source.files)
        described.append(
            {
                "name": stream.name,
                "content": content,
                "slice": cut,
                **stream.choice.shaped_by(),
                **({"nulls": "left out"} if of_table else {}),
                # What is read of a row changed: flags of turns, optional columns by row, null beside calls. Texts and
                # templates read what they did.
                **({} if stream.choice.format == "text" or stream.choice.input_template else read),
            }
        )
    return {
        "format_version": FORMAT_VERSION,
        "streams": described,
        "tokenizer": tokenizer,
        # The manifest is not protected: store only the digest of a secret.
        "template_arguments": {
            name: _sha256(value)[:24] if is_secret_name(name) else value
            for name, value in sorted(settings.model.chat_template_arguments.items())
        },
        "train_on": data.train_on,
        "max_length": data.max_length,
        "on_too_long": data.on_too_long,
        "on_bad_row": data.on_bad_row,
        "group_by": data.group_by,
        # Only included if it is not the default, so that existing prepared datasets stay valid.
        **({} if data.tool_format == "plain" else {"tool_format": data.tool_format}),
        "chunk_overlap": settings.chunk_overlap,
        **asdict(settings.reading),
    }


def fingerprint(shape: Mapping[str, Any]) -> str:
    """The name of a prepared dataset: 24 hexadecimal digits of the SHA-256 of what it depends on."""
    return _sha256(shape)[:24]


def tokenizer_identity(config: ModelConfig, digests: Digests) -> str:
    """A digest of everything in a tokenizer that changes tokens: for a local model that of its files, without
    loading them, else that of its parts.
    Raises FinrayError: the tokenizer or the chat template does not exist."""
    files = tokenizer_files(config)
    if files is None:
        tokenizer = load_tokenizer(config)
        digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
        digest.update(json.dumps(tokenizer.chat_template, sort_keys=True).encode())
        digest.update(json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id]).encode())
        return digest.hexdigest()
    contents = [[file.name, digests.of(file)] for file in files]
    # Only included if they are there, so that existing prepared datasets stay valid.
    added: list[Any] = [config.new_tokens] if config.new_tokens else []
    if config.chat_template is not None and is_template(config.chat_template):
        added.append(config.chat_template)
    return _sha256([contents, [version("transformers"), version("tokenizers")], *added])


def _sha256(plain: Any) -> str:
    """Of a value's JSON text."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def plan(settings: PrepareSettings, streams: list[Stream]) -> list[Part]:
    """The parts of all streams, in order. Raises DataError: a source is empty, or its format cannot be determined."""
    parts: list[Part] = []
    for stream in streams:
        cut = plan_parts(stream.source, settings.reading)
        columns = first_columns(stream, cut, settings)
        try:
            row_format = stream.choice.decide(columns)
        except DataError as error:
            if len(streams) > 1:
                error.message = f"{stream.split} ({stream.source.name}): {error.message}"
            raise
        for number, part in enumerate(cut):
            of_table = any(piece.kind in TABLE_KINDS for piece in part)
            parts.append(Part(stream, number, part, replace(row_format, of_table=of_table)))
    return parts


def first_columns(stream: Stream, parts: list[tuple[ByteRange, ...]], settings: PrepareSettings) -> list[str]:
    """The columns of the first readable rows, which decide the format.
    Raises DataError: there is no such row; or one is bad and `data.on_bad_row` is `error`."""
    columns: dict[str, None] = {}
    rows = 0
    bad: DataError | None = None
    for piece in (piece for part in parts for piece in part):
        for number, value in read_piece(piece, stream.source, settings.reading):
            if not isinstance(value, DataError):
                columns |= dict.fromkeys(value)
                rows += 1
            else:
                bad = bad or bad_row(value, piece, number, settings.reading)
                if settings.data.on_bad_row == "error":
                    raise bad
            if rows == _ROWS_THAT_DECIDE:
                return list(columns)
    if columns:
        return list(columns)
    if bad is not None:
        raise bad
    raise DataError("the dataset is empty", where=stream.source.name, repair="check data.source and the split names")
