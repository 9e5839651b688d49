"""The prepared dataset: token rows in memory-mapped Arrow files, and a manifest that says what shaped them.

A directory is made under a temporary name and renamed when it is whole, so what carries the final name is complete.
docs/formats.md is the specification.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from finray.config.schema import DataConfig
from finray.data.formats import Format, detect, to_example
from finray.data.sources import Row, Source, content_digest, read, resolve
from finray.data.tokenize import Tokenizer, Tokens
from finray.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("source_row", pa.int64()),
        ("supervised", pa.int32()),
    ]
)
_ROWS_PER_BATCH = 1024
_ROWS_PER_SHARD = 262_144


@dataclass
class SplitStats:
    """Counts of one split. ``longest`` is in tokens; ``unlearnable`` rows had nothing to learn and were left out."""

    source_rows: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    dropped_too_long: int = 0
    unlearnable: int = 0
    longest: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Preparation:
    """Everything that shapes a prepared dataset, and the way to it.

    Attributes:
        sources: split name (``train``, ``eval``) to its source.
        data: the data section of the config.
        tokenizer_digest: from :func:`tokenizer_digest`.
    """

    sources: dict[str, Source]
    data: DataConfig
    tokenizer_digest: str

    def shaped_by(self) -> dict[str, Any]:
        """The inputs of the fingerprint, as they are kept in the manifest."""
        data = self.data
        return {
            "format_version": FORMAT_VERSION,
            "sources": {split: content_digest(source) for split, source in self.sources.items()},
            "tokenizer": self.tokenizer_digest,
            "format": data.format,
            "field_mapping": dict(sorted(data.field_mapping.items())),
            "train_on": data.train_on,
            "max_length": data.max_length,
            "on_too_long": data.on_too_long,
        }


def fingerprint(shaped_by: dict[str, Any]) -> str:
    """The name of a prepared dataset: 24 hexadecimal digits of the SHA-256 of what shaped it."""
    return hashlib.sha256(json.dumps(shaped_by, sort_keys=True).encode()).hexdigest()[:24]


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of everything about a tokenizer that changes tokens: its model, special tokens and chat template."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(json.dumps(tokenizer.chat_template, sort_keys=True).encode())
    digest.update(json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id]).encode())
    return digest.hexdigest()


def plan_sources(data: DataConfig) -> dict[str, Source]:
    """The sources of the splits that a config names (a ratio split is taken later, from the training rows)."""
    train = resolve(data.source, split=data.train_split, subset=data.subset, revision=data.revision)
    if data.eval_source is not None:
        held_out = resolve(data.eval_source, split=data.eval_split or "validation")
    elif data.eval_split is not None:
        held_out = resolve(data.source, split=data.eval_split, subset=data.subset, revision=data.revision)
    else:
        return {"train": train}
    if held_out == train or set(held_out.files) & set(train.files):
        raise DataError(
            "evaluation would see the training rows: both are read from the same place",
            where="data.eval_source" if data.eval_source is not None else "data.eval_split",
            repair="name other rows with data.eval_source, or hold some out with data.eval_ratio",
        )
    return {"train": train, "eval": held_out}


def prepare(preparation: Preparation, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Write the prepared dataset, or find it already there.

    Returns:
        The directory, named by the fingerprint.

    Raises:
        DataError: a row is bad, a source is empty, or no token would be learned.
    """
    shaped_by = preparation.shaped_by()
    target = cache_dir / fingerprint(shaped_by)
    if (target / MANIFEST).is_file():
        return target
    scratch = cache_dir / f".tmp-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        splits: dict[str, SplitStats] = {}
        kinds: dict[str, str] = {}
        for split, source in preparation.sources.items():
            kinds[split], splits[split] = _write_split(scratch / split, source, preparation.data, tokenizer)
        manifest = {
            "fingerprint": target.name,
            "shaped_by": shaped_by,
            "kinds": kinds,
            "splits": {split: asdict(stats) for split, stats in splits.items()},
        }
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _publish(scratch, target)
    except OSError as error:
        raise DataError(f"the prepared data set cannot be written: {error.strerror}", where=str(cache_dir)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    try:
        os.replace(scratch, target)
    except OSError:
        # Somebody else prepared the same data meanwhile; equal fingerprints mean equal bytes.
        if not (target / MANIFEST).is_file():
            raise


def _write_split(folder: Path, source: Source, data: DataConfig, tokenizer: Tokenizer) -> tuple[str, SplitStats]:
    folder.mkdir()
    rows = read(source)
    first = next(rows, None)
    if first is None:
        raise DataError("the data set is empty", where=source.name, repair="check data.source and the split names")
    kind: Format = detect(list(first.value), data.field_mapping) if data.format == "auto" else data.format
    stats = SplitStats()
    tokens = _tokens(chain([first], rows), kind, data, tokenizer, stats)
    for shard in range(2**31):
        part = list(islice(tokens, _ROWS_PER_SHARD))
        if not part:
            break
        stats.files.append(_write_shard(folder / f"tokens-{shard:05d}.arrow", part))
    if not stats.supervised:
        raise DataError(
            f"none of the {stats.source_rows} rows has a token to learn",
            where=source.name,
            repair="check data.train_on, the roles of the messages, and data.max_length (answers may be cut off)",
        )
    return type(to_example(first, kind, data.field_mapping)).__name__.lower(), stats


def _tokens(
    rows: Iterator[Row], kind: Format, data: DataConfig, tokenizer: Tokenizer, stats: SplitStats
) -> Iterator[tuple[int, Tokens]]:
    number = 0
    while batch := list(islice(rows, 256)):
        examples = [to_example(row, kind, data.field_mapping) for row in batch]
        for pieces in _encode(tokenizer, batch, examples):
            stats.source_rows += 1
            stats.dropped_too_long += not pieces
            for piece in pieces:
                stats.truncated += piece.truncated
                if not piece.supervised:
                    stats.unlearnable += 1
                    continue
                _count(stats, piece)
                yield number, piece
            number += 1


def _encode(tokenizer: Tokenizer, batch: list[Row], examples: list[Any]) -> list[list[Tokens]]:
    try:
        return tokenizer.encode(examples)
    except DataError:
        # One by one, to name the row at fault.
        for row, example in zip(batch, examples, strict=True):
            try:
                tokenizer.encode([example])
            except DataError as error:
                where = row.where if error.where is None else f"{row.where} ({error.where})"
                raise DataError(error.message, where=where, repair=error.repair) from None
        raise


def _count(stats: SplitStats, tokens: Tokens) -> None:
    stats.rows += 1
    stats.tokens += len(tokens.ids)
    stats.supervised += tokens.supervised
    stats.longest = max(stats.longest, len(tokens.ids))


def _write_shard(path: Path, rows: list[tuple[int, Tokens]]) -> dict[str, Any]:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for at in range(0, len(rows), _ROWS_PER_BATCH):
            part = rows[at : at + _ROWS_PER_BATCH]
            columns = [
                pa.array([tokens.ids for _, tokens in part], type=SCHEMA.field(0).type),
                pa.array([tokens.mask for _, tokens in part], type=SCHEMA.field(1).type),
                pa.array([number for number, _ in part], type=pa.int64()),
                pa.array([tokens.supervised for _, tokens in part], type=pa.int32()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest, "rows": len(rows)}


class PreparedSplit:
    """Rows of one split, read by index from memory-mapped files.

    Attributes:
        lengths: int64 tokens per row.
        supervised: int64 targets per row.
        source_rows: int64 row number in the source, from 0.
    """

    def __init__(self, folder: Path, files: Iterable[str], indices: npt.NDArray[np.int64] | None = None) -> None:
        self._ids: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        self._masks: list[npt.NDArray[np.uint8]] = []
        lengths, supervised, sources, counts = [], [], [], []
        for name in files:
            for batch in _batches(folder / name):
                ids, mask = batch.column(0), batch.column(1)
                offsets = ids.offsets.to_numpy()
                self._ids.append((ids.values.to_numpy(), offsets))
                self._masks.append(mask.values.to_numpy())
                lengths.append(np.diff(offsets))
                sources.append(batch.column(2).to_numpy())
                supervised.append(batch.column(3).to_numpy())
                counts.append(len(batch))
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        select = slice(None) if indices is None else indices
        self._indices = np.arange(self._starts[-1])[select]
        self.lengths = np.concatenate(lengths).astype(np.int64)[select]
        self.supervised = np.concatenate(supervised).astype(np.int64)[select]
        self.source_rows = np.concatenate(sources)[select]

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Token ids and loss mask of a row, as views of the mapped file."""
        at = int(self._indices[number])
        batch = int(np.searchsorted(self._starts, at, side="right")) - 1
        within = at - int(self._starts[batch])
        values, offsets = self._ids[batch]
        span = slice(int(offsets[within]), int(offsets[within + 1]))
        return values[span], self._masks[batch][span]


def _batches(path: Path) -> Iterator[Any]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


class PreparedDataset:
    """A prepared dataset on disk.

    Raises:
        DataError: the directory is not a whole prepared dataset, or a file has another size than the manifest says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise DataError("not a prepared data set", where=str(folder), repair="run `finray prepare` again") from None
        for split, stats in self.manifest["splits"].items():
            for file in stats["files"]:
                path = self.folder / split / file["name"]
                if not path.is_file() or path.stat().st_size != file["bytes"]:
                    raise DataError(
                        "a file of the prepared data set is missing or cut off",
                        where=str(path),
                        repair=f"delete {self.folder} and run the command again",
                    )

    def splits(self, *, eval_ratio: float, seed: int) -> tuple[PreparedSplit, PreparedSplit | None]:
        """The training rows and the evaluation rows (None when nothing is held out)."""
        from finray.data.order import split_indices

        if "eval" in self.manifest["splits"]:
            return self._split("train"), self._split("eval")
        if eval_ratio:
            count = self.manifest["splits"]["train"]["rows"]
            kept, held_out = split_indices(count, eval_ratio=eval_ratio, seed=seed)
            if not len(held_out):
                raise DataError("one row cannot be split", where="data.eval_ratio", repair="give more rows")
            return self._split("train", kept), self._split("train", held_out)
        return self._split("train"), None

    def _split(self, name: str, indices: npt.NDArray[np.int64] | None = None) -> PreparedSplit:
        files = [file["name"] for file in self.manifest["splits"][name]["files"]]
        return PreparedSplit(self.folder / name, files, indices)
