"""Preparation in this process: what a config's data is, its parts written, and the dataset put together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finray.config.paths import is_url, prepared_dir
from finray.config.schema import Config
from finray.data.dataset.manifest import bad_rows, manifest_of
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import (
    Settings,
    Stream,
    fingerprint,
    plan,
    plan_streams,
    shaped_by,
    tokenizer_digest,
)
from finray.data.dataset.prepared import BAD_ROWS, MANIFEST
from finray.data.storage import DigestCache, Folder, content_digest
from finray.errors import DataError, FinrayError
from finray.pretrained.tokenizers import check_exists, load_tokenizer, tokenizer_files
from finray.records import Note, Record

Handle = Callable[[Record], None]
_DIGESTS = ".digests.json"
_PATIENCE_S = 1.0


def ignore(record: Record) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A preparation that can be done, or has been.

    Attributes:
        settings: what shapes tokens.
        streams: sources by split.
        shape: everything that shapes the dataset, as in its manifest.
        root: directory or URL that holds prepared datasets.
    """

    settings: Settings
    streams: list[Stream]
    shape: dict[str, Any]
    root: str

    @property
    def name(self) -> str:
        """The fingerprint."""
        return fingerprint(self.shape)

    @property
    def target(self) -> Folder:
        """Where the prepared dataset lies when it is whole."""
        return Folder(f"{self.root}/{self.name}")

    @property
    def scratch(self) -> Folder:
        """Where it is made. Remote objects cannot be renamed; there the manifest alone makes it whole."""
        return self.target if is_url(self.root) else Folder(f"{self.root}/.partial-{self.name}")

    @property
    def is_done(self) -> bool:
        """Whether it is there already, with a manifest that can be read."""
        try:
            return bool(json.loads(self.target.read(MANIFEST) or b"{}").get("fingerprint") == self.name)
        except (ValueError, AttributeError):
            return False


def plan_preparation(config: Config, *, root: str | None = None) -> Planned:
    """What a config's data is, and where it will be; reads no rows, and loads no tokenizer from a local model.

    Raises:
        FinrayError: a source or the model does not exist.
    """
    check_exists(config.model.name)
    root = root or prepared_dir(config)
    digests = DigestCache(None if is_url(root) else Path(root) / _DIGESTS)
    settings = Settings.of(config)
    streams = plan_streams(config.data, settings.reading)
    shape = shaped_by(settings, streams, tokenizer=_tokenizer_identity(config, digests), digests=digests)
    return Planned(settings, streams, shape, root)


def _tokenizer_identity(config: Config, digests: DigestCache) -> str:
    files = tokenizer_files(config.model)
    if files is None:
        return tokenizer_digest(load_tokenizer(config.model))
    try:
        contents = [[file.name, content_digest(str(file), cache=digests)] for file in files]
    except FileNotFoundError as error:
        raise DataError("the chat template does not exist", where=f"model.chat_template={error.filename}") from None
    libraries = [version("transformers"), version("tokenizers")]
    # Only where there are some, so that what is prepared already stays good.
    added = [config.model.new_tokens] if config.model.new_tokens else []
    return hashlib.sha256(json.dumps([contents, libraries, *added]).encode()).hexdigest()


def check_inputs(config: Config) -> None:
    """What can be known to be wrong before Ray is started.

    Raises:
        FinrayError: a data file or the model does not exist.
    """
    check_exists(config.model.name)
    _check_task(config)
    plan_streams(config.data, Settings.of(config).reading)


def _check_task(config: Config) -> None:
    data = config.data
    if "labelled_text" in (data.format, *(one.format for one in data.mix)):
        raise DataError(
            "rows with a label are for classification, and model.task is causal_lm",
            where="data.format",
            repair="set data.format to text, to learn the text alone; `finray prepare` prepares labelled text",
        )


def prepare_here(config: Config, *, root: str | Path | None = None) -> str:
    """Prepare the data of a config in this process; returns the directory or URL of the prepared dataset.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    planned = plan_preparation(config, root=None if root is None else str(root))
    if not planned.is_done:
        with locked(planned):
            if not planned.is_done:
                encoder = planned.settings.encoder(load_tokenizer(config.model))
                writer = PartWriter(planned.settings, encoder, planned.scratch)
                with cleaned(planned):
                    parts = plan(planned.settings, planned.streams)
                    finish(planned, config, [writer.write(part) for part in parts])
    return planned.target.root


def is_prepared(config: Config) -> str | None:
    """Where the data of a config lies, if it is prepared already.

    Raises:
        FinrayError: a source or the model does not exist.
    """
    planned = plan_preparation(config)
    return planned.target.root if planned.is_done else None


def finish(planned: Planned, config: Config, results: list[dict[str, Any]]) -> None:
    """Write the manifest and give the directory its name.

    Raises:
        DataError: a source changed meanwhile, or there is nothing to learn.
    """
    if plan_preparation(config, root=planned.root).shape != planned.shape:
        raise DataError(
            "the source changed while it was prepared",
            where=planned.streams[0].source.name,
            repair="run the command again when nobody writes to it",
        )
    manifest = manifest_of(planned.shape, planned.streams, results)
    scratch = planned.scratch
    bad = bad_rows(planned.streams, results)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad)
    try:
        if bad:
            scratch.write(BAD_ROWS, lines.encode())
        notes = [f"{one['stream']}/part-{int(one['number']):05d}.json" for one in results]
        content = (json.dumps(manifest, indent=1) + "\n").encode()
        if not scratch.is_remote:
            for note in notes:
                scratch.remove(note)
            scratch.write(MANIFEST, content)
            for path in Path(scratch.root).rglob(".*"):
                # Left by a writer that was killed.
                path.unlink(missing_ok=True)
            # What carries the name without being whole.
            planned.target.delete()
            Path(scratch.root).rename(planned.target.root)
        else:
            scratch.write(MANIFEST, content)
            for note in notes:
                scratch.remove(note)
    except OSError as error:
        raise DataError(f"the prepared data set cannot be written: {error.strerror}", where=planned.root) from None


@contextmanager
def cleaned(planned: Planned) -> Iterator[None]:
    """What was written before an error in the data is of no use, and removed; after a kill it is gone on with.

    Not behind a URL, where somebody else may be writing the same objects.
    """
    try:
        yield
    except FinrayError:
        if not planned.scratch.is_remote:
            planned.scratch.delete()
        raise


@contextmanager
def locked(planned: Planned, handle: Handle = ignore) -> Iterator[None]:
    """Two preparations of the same data on one file system take turns; remote ones write the same objects."""
    if is_url(planned.root):
        yield
        return
    from filelock import FileLock, Timeout

    locks = Path(planned.root) / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{planned.name}.lock")
        try:
            lock.acquire(timeout=_PATIENCE_S)
        except Timeout:
            handle(Note("another process is preparing this data; waiting for it"))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"the prepared data set cannot be written: {error.strerror or error}", where=planned.root
        ) from None
