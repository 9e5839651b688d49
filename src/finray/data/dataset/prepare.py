"""Preparing a data set: what a config's data is, its parts written, and the dataset put together.

A :class:`Preparation` works in a thread of the process that starts it. Parts wait in one queue: the thread writes them
from the front, and helpers, such as Ray tasks on other machines, take them from the back. The bytes of a part follow
from the source and the config alone, so it does not matter who writes which part.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from finray.config.paths import is_url, prepared_dir
from finray.config.schema import Config
from finray.data.dataset.manifest import PartResult, bad_rows, manifest_of, part_note
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import (
    Part,
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
from finray.errors import ClusterError, DataError, FinrayError
from finray.pretrained.tokenizers import check_exists, load_tokenizer, tokenizer_files, without_torch
from finray.records import Note, PrepareProgress, Record

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


class Preparation:
    """The preparation of a config's data, at work in a thread of this process; see :func:`start_preparation`.

    Attributes:
        config: whose data it is.
    """

    def __init__(self, config: Config, *, root: str | None, hide_torch: bool) -> None:
        self.config = config
        self._root = root
        self._hide_torch = hide_torch
        self._outcome: Future[str] = Future()
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        # Guards what follows, and is notified when any of it changes.
        self._changed = threading.Condition()
        self._scratch: str | None = None
        self._left: deque[Part] = deque()
        self._helped = 0
        self._results: list[PartResult] = []
        self._failure: FinrayError | None = None
        self._cancelled = False
        self._seconds_per_part: float | None = None
        # A process that is interrupted ends at once; the parts that are finished are kept for the next attempt.
        threading.Thread(target=self._run, name="finray-prepare", daemon=True).start()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None, *, handle: Handle = ignore) -> bool:
        """Wait until the data is prepared or cannot be, showing records of progress; whether that is so.

        Args:
            timeout: seconds after which to return in any case; None for none.
            handle: called, in this thread, with each record.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            done = self._outcome.done()
            while not self._records.empty():
                handle(self._records.get())
            left = None if deadline is None else deadline - time.monotonic()
            if done or (left is not None and left <= 0):
                return done
            with self._changed:
                self._changed.wait_for(lambda: self._outcome.done() or not self._records.empty(), left)

    def result(self, *, handle: Handle = ignore) -> str:
        """Wait; returns the directory or URL of the prepared dataset.

        Raises:
            FinrayError: the data, the tokenizer or the storage is not right.
        """
        self.wait(handle=handle)
        return self._outcome.result()

    def cancel(self) -> None:
        """Begin no further part. What is finished stays for the next preparation; nothing happens after the end."""
        with self._changed:
            self._cancelled = True
            self._left.clear()
            self._helped = 0
            self._changed.notify_all()

    # --- for helpers ------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> str | None:
        """Where parts are written; None before it is known which parts there are."""
        return self._scratch

    @property
    def seconds_left(self) -> float | None:
        """How long this process alone would take for the parts that nobody has begun; None before that can be told."""
        with self._changed:
            return None if self._seconds_per_part is None else len(self._left) * self._seconds_per_part

    def take(self) -> Part | None:
        """A part for a helper to write, the last one left; None where none is left. Answer with :meth:`give`."""
        with self._changed:
            if not self._left:
                return None
            self._helped += 1
            return self._left.pop()

    def give(self, result: PartResult | FinrayError) -> None:
        """What came of a part that was taken; an error ends the preparation."""
        with self._changed:
            self._helped = max(0, self._helped - 1)
            self._add(result)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            location = self._prepare()
        except BaseException as error:
            # Raised where the result is asked for.
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(location)
        with self._changed:
            self._changed.notify_all()

    def _prepare(self) -> str:
        planned = plan_preparation(self.config, root=self._root)
        if not planned.is_done:
            with locked(planned, self._tell):
                if not planned.is_done:
                    with cleaned(planned):
                        parts = plan(planned.settings, planned.streams)
                        with self._changed:
                            self._scratch = planned.scratch.root
                            self._left.extend(parts if not self._cancelled else [])
                            self._changed.notify_all()
                        self._write(planned, len(parts))
                        finish(planned, self.config, self._results)
        return planned.target.root

    def _write(self, planned: Planned, total: int) -> None:
        """Write parts until none is left, and wait for those that helpers have taken."""
        started = time.perf_counter()
        self._total, self._started = total, started
        try:
            with without_torch() if self._hide_torch else nullcontext():
                tokenizer = load_tokenizer(self.config.model)
            writer = PartWriter(planned.settings, planned.settings.encoder(tokenizer), planned.scratch)
            began, written = time.perf_counter(), 0
            while (part := self._next()) is not None:
                result = writer.write(part)
                written += 1
                with self._changed:
                    self._seconds_per_part = (time.perf_counter() - began) / written
                    self._add(result)
        finally:
            with self._changed:
                # After an error the directory is removed, and nobody may be writing to it then.
                self._left.clear()
                self._changed.wait_for(lambda: not self._helped)
        if self._failure is not None:
            raise self._failure

    def _next(self) -> Part | None:
        with self._changed:
            self._changed.wait_for(lambda: self._left or not self._helped or self._failure or self._cancelled)
            if self._cancelled:
                raise _Cancelled
            return self._left.popleft() if self._left and self._failure is None else None

    def _add(self, result: PartResult | FinrayError) -> None:
        if isinstance(result, FinrayError):
            self._failure = self._failure or result
        else:
            self._results.append(result)
            counts = [one.counts for one in self._results]
            rows, tokens = sum(one.source_rows for one in counts), sum(one.tokens for one in counts)
            seconds = time.perf_counter() - self._started
            self._records.put(PrepareProgress(len(counts), self._total, rows, tokens, seconds))
        self._changed.notify_all()

    def _tell(self, record: Record) -> None:
        with self._changed:
            self._records.put(record)
            self._changed.notify_all()


class _Cancelled(Exception):
    """Nobody wants the result any more."""


def start_preparation(config: Config, *, root: str | Path | None = None, hide_torch: bool = False) -> Preparation:
    """Begin to prepare the data of a config in a thread of this process; returns at once.

    Where the data is prepared already, the result is there within milliseconds. Used as a context manager, a
    preparation is cancelled when the block is left before its end.

    Args:
        config: with absolute paths, where helpers are to read them too.
        root: holds prepared datasets; None for what the config says.
        hide_torch: load the tokenizer without importing torch. For processes that will load no model, because
            Transformers does not look for torch again.
    """
    return Preparation(config, root=None if root is None else str(root), hide_torch=hide_torch)


def prepare_here(config: Config, *, root: str | Path | None = None) -> str:
    """Prepare the data of a config in this process; returns the directory or URL of the prepared dataset.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    with start_preparation(config, root=root) as preparation:
        return preparation.result()


def is_prepared(config: Config) -> str | None:
    """Where the data of a config lies, if it is prepared already.

    Raises:
        FinrayError: a source or the model does not exist.
    """
    planned = plan_preparation(config)
    return planned.target.root if planned.is_done else None


def finish(planned: Planned, config: Config, results: list[PartResult]) -> None:
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
        notes = [part_note(one.stream, one.number) for one in results]
        content = manifest.to_bytes()
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
    """Remove what was written before an error in the data, which is of no use; what a kill leaves is kept.

    Not behind a URL, where somebody else may be writing the same objects.
    """
    try:
        yield
    except FinrayError as error:
        if not isinstance(error, ClusterError) and not planned.scratch.is_remote:
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
