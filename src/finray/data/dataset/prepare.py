"""Prepares a dataset: plans a config's data, writes the parts, and assembles the dataset.

A :class:`Preparation` works in a thread of the process that starts it. Parts wait in one queue: the thread takes them
from the front, and helpers, such as Ray tasks on other machines, from the back. The bytes of a part depend only on the
source and the config, so it does not matter who writes which part.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.config.objectives import spec_of
from finray.config.paths import is_url, prepared_dir
from finray.config.schema import Config
from finray.config.trust import require_trusted
from finray.data.dataset.manifest import MANIFEST, Manifest, PartResult, bad_rows, manifest_of, part_note
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import (
    Part,
    PrepareSettings,
    Stream,
    fingerprint,
    plan,
    plan_streams,
    shaped_by,
    tokenizer_identity,
    with_class_names,
)
from finray.data.dataset.prepared import BAD_ROWS
from finray.data.storage import Digests, Folder
from finray.errors import ClusterError, DataError, FinrayError
from finray.limits import arm
from finray.pretrained.tokenizers import check_exists, load_tokenizer, without_torch
from finray.records import Note, PrepareProgress, Record

Handle = Callable[[Record], None]
_DIGESTS = ".digests.jsonl"
_PATIENCE_S = 1.0


def ignore(record: Record) -> None:
    """Shows no progress."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned or finished preparation."""

    settings: PrepareSettings  # settings that change tokens
    streams: list[Stream]  # sources by split
    shape: dict[str, Any]  # everything that the dataset depends on, as in its manifest
    root: str  # directory or URL that holds prepared datasets

    @property
    def name(self) -> str:
        """The fingerprint."""
        return fingerprint(self.shape)

    @property
    def target(self) -> Folder:
        """Location of the finished dataset."""
        return Folder(f"{self.root}/{self.name}")

    @property
    def scratch(self) -> Folder:
        """Location while it is written. Remote objects cannot be renamed; there only the manifest marks completion."""
        return self.target if is_url(self.root) else Folder(f"{self.root}/.partial-{self.name}")

    @property
    def is_done(self) -> bool:
        """Whether the dataset exists, with an intact manifest."""
        try:
            content = self.target.read(MANIFEST)
            return content is not None and Manifest.from_bytes(content, self.target).fingerprint == self.name
        except DataError:
            return False

    def note_use(self) -> None:
        """Update the manifest's time of last use, for `finray cache prune`."""
        if not self.target.is_remote:
            with suppress(OSError):
                os.utime(Path(self.target.root) / MANIFEST)


def plan_preparation(config: Config, *, root: str | None = None) -> Planned:
    """Plan a config's data and its location; reads no rows, and loads no tokenizer from a local model.
    Raises FinrayError: a source or the model does not exist."""
    check_exists(config.model.name)
    root = root or prepared_dir(config)
    digests = Digests(None if is_url(root) else Path(root) / _DIGESTS)
    settings = PrepareSettings.of(config)
    streams = with_class_names(plan_streams(settings))
    shape = shaped_by(settings, streams, tokenizer=tokenizer_identity(config.model, digests), digests=digests)
    return Planned(settings, streams, shape, root)


def check_inputs(config: Config) -> None:
    """Find errors that can be found before Ray is started.
    Raises FinrayError: a data file or the model does not exist."""
    check_exists(config.model.name)
    data, task, spec = config.data, config.model.task, spec_of(config)
    if "labelled_text" in (data.format, *(item.format for item in data.mix)) and "labelled" not in spec.rows:
        raise DataError(
            f"the rows have labels for classification, but model.task is {task}",
            where="data.format",
            repair="set data.format to text to train on the text only, or model.task to sequence_classification",
        )
    streams = plan_streams(PrepareSettings.of(config))
    for choice in [stream.choice for stream in streams] if spec.reads_labels else []:
        template = choice.input_template is not None
        if template or choice.format not in ("auto", "labelled_text"):
            raise DataError(
                f"{task} needs rows with a label, but {'a template' if template else f'`{choice.format}`'} makes "
                "rows without one",
                where="data.input_template" if template else "data.format",
                repair="leave it out; use data.field_mapping to name the columns, or data.converter to make the rows",
            )


class Preparation:
    """The preparation of a config's data, running in a thread of this process; see :func:`start_preparation`.

    Attributes:
        config: defines the data.
    """

    def __init__(self, config: Config, *, root: str | None, hide_torch: bool) -> None:
        self.config = config
        self._root = root
        self._hide_torch = hide_torch
        self._outcome: Future[str] = Future()
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        # Guards the following attributes; notified when any of them changes.
        self._changed = threading.Condition()
        self._scratch: str | None = None
        self._left: deque[Part] = deque()
        self._helped = 0
        self._results: list[PartResult] = []
        self._failure: FinrayError | None = None
        self._cancelled = False
        self._seconds_per_part: float | None = None
        # Reports hangs in that thread.
        arm()
        # A process that is interrupted ends at once; finished parts are kept for the next attempt.
        threading.Thread(target=self._run, name="finray-prepare", daemon=True).start()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None, *, handle: Handle = ignore) -> bool:
        """Wait until the preparation has ended, or ``timeout`` seconds have passed, and show records of progress in
        this thread; returns whether it has ended."""
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
        Raises FinrayError: a problem with the data, the tokenizer or the storage."""
        self.wait(handle=handle)
        return self._outcome.result()

    def cancel(self) -> None:
        """Start no more parts. Finished ones are kept for the next preparation; no effect after the end."""
        with self._changed:
            self._cancelled = True
            self._left.clear()
            self._helped = 0
            self._changed.notify_all()

    # --- for helpers ------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> str | None:
        """Where parts are written; None before the parts are known."""
        return self._scratch

    @property
    def seconds_left(self) -> float | None:
        """Time in which this process alone would finish the remaining parts; None before it can be estimated."""
        with self._changed:
            return None if self._seconds_per_part is None else len(self._left) * self._seconds_per_part

    def take(self) -> Part | None:
        """Take the last remaining part for a helper; None if there is none. Answer with :meth:`give`."""
        with self._changed:
            if not self._left:
                return None
            self._helped += 1
            return self._left.pop()

    def give(self, result: PartResult | FinrayError) -> None:
        """The result for a part that was taken; an error ends the preparation."""
        with self._changed:
            self._helped = max(0, self._helped - 1)
            self._add(result)

    def take_back(self, part: Part) -> None:
        """Return a part that was taken but not written."""
        with self._changed:
            self._helped = max(0, self._helped - 1)
            if not self._cancelled and self._failure is None:
                self._left.append(part)
            self._changed.notify_all()

    @property
    def patience_s(self) -> float:
        """How long a helper may be silent before this process writes its part: far longer than writing takes."""
        with self._changed:
            return _PATIENCE_S * 10 + 5 * (self._seconds_per_part or 10.0)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            planned = plan_preparation(self.config, root=self._root)
            if not planned.is_done:
                with locked(planned.root, planned.name, handle=self._notify):
                    # Another process may have prepared it meanwhile.
                    if not planned.is_done:
                        if planned.target.read(MANIFEST) is not None:
                            text = f"{planned.target.at(MANIFEST)} is damaged: the data is prepared again"
                            self._notify(Note(text, level="warning"))
                        self._prepare(planned)
            planned.note_use()
        except BaseException as error:
            # Raised by `result`.
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(planned.target.root)
        with self._changed:
            self._changed.notify_all()

    def _prepare(self, planned: Planned) -> None:
        try:
            parts = plan(planned.settings, planned.streams)
            with self._changed:
                self._total, self._started = len(parts), time.perf_counter()
                self._scratch = planned.scratch.root
                self._left.extend(parts if not self._cancelled else [])
                self._changed.notify_all()
            self._write_parts(planned)
            finish(planned, self.config, self._results)
        except FinrayError as error:
            # Parts written before an error in the data are useless; those left by a kill are kept. Behind a URL another
            # process may be writing the same objects.
            if not isinstance(error, ClusterError) and not planned.scratch.is_remote:
                planned.scratch.delete()
            raise

    def _write_parts(self, planned: Planned) -> None:
        """Write parts until none is left, and wait for those taken by helpers."""
        try:
            with without_torch() if self._hide_torch else nullcontext():
                tokenizer = load_tokenizer(self.config.model)
            writer = PartWriter(planned.settings, planned.settings.encoder(tokenizer), planned.scratch)
            began, written = time.perf_counter(), 0
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._left or not self._helped or self._cancelled)
                    if self._cancelled:
                        raise _Cancelled
                    if not self._left or self._failure is not None:
                        break
                    part = self._left.popleft()
                result = writer.write(part)
                written += 1
                with self._changed:
                    self._seconds_per_part = (time.perf_counter() - began) / written
                    self._add(result)
        finally:
            with self._changed:
                # After an error the directory is removed, so nothing may still write to it.
                self._left.clear()
                self._changed.wait_for(lambda: not self._helped)
        if self._failure is not None:
            raise self._failure

    def _add(self, result: PartResult | FinrayError) -> None:
        if isinstance(result, FinrayError):
            self._failure = self._failure or result
        else:
            self._results.append(result)
            done = self._results
            rows, tokens = sum(part.source_rows for part in done), sum(part.tokens for part in done)
            seconds = time.perf_counter() - self._started
            self._records.put(PrepareProgress(len(done), self._total, rows, tokens, seconds))
        self._changed.notify_all()

    def _notify(self, record: Record) -> None:
        with self._changed:
            self._records.put(record)
            self._changed.notify_all()


class _Cancelled(Exception):
    """The preparation was cancelled."""


def start_preparation(config: Config, *, root: str | Path | None = None, hide_torch: bool = False) -> Preparation:
    """Start preparing the data of a config in a thread of this process; returns at once.

    If the data is already prepared, the result is available within milliseconds. As a context manager, a preparation is
    cancelled when the block is left before it has ended.

    Args:
        config: with absolute paths, if helpers read them too.
        root: parent of prepared datasets; None uses the config's.
        hide_torch: load the tokenizer without importing torch. Only for processes that will load no model, because
            Transformers does not look for torch again.
    """
    goes_there = root is None and config.prepare.dir is None
    others = ["train.objective", *(["run.output_dir"] if goes_there else [])]
    require_trusted(config, "data", "model", "prepare", *others)
    return Preparation(config, root=None if root is None else str(root), hide_torch=hide_torch)


def prepare_here(config: Config, *, root: str | Path | None = None) -> str:
    """Prepare the data of a config in this process; returns the directory or URL of the prepared dataset.
    Raises FinrayError: a problem with the data, the tokenizer or the storage."""
    with start_preparation(config, root=root) as preparation:
        return preparation.result()


def is_prepared(config: Config) -> str | None:
    """The location of a config's prepared data; None if it is not prepared yet.
    Raises FinrayError: a source or the model does not exist."""
    planned = plan_preparation(config)
    return planned.target.root if planned.is_done else None


def finish(planned: Planned, config: Config, results: list[PartResult]) -> None:
    """Write the manifest and move the directory into place.
    Raises DataError: a source changed meanwhile, or there is nothing to train on."""
    if plan_preparation(config, root=planned.root).shape != planned.shape:
        raise DataError(
            "the source changed while it was being prepared",
            where=planned.streams[0].source.name,
            repair="run the command again when nothing writes to it",
        )
    manifest = manifest_of(planned.shape, planned.streams, results)
    bad = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad_rows(manifest, results))
    scratch = planned.scratch
    try:
        if bad:
            scratch.write(BAD_ROWS, bad.encode())
        scratch.write(MANIFEST, manifest.to_bytes())
        for result in results:
            scratch.remove(part_note(result.stream, result.number))
        if not scratch.is_remote:
            for path in Path(scratch.root).rglob(".*"):
                # Left by a killed writer.
                path.unlink(missing_ok=True)
            # An incomplete directory with that name.
            planned.target.delete()
            Path(scratch.root).rename(planned.target.root)
    except OSError as error:
        raise DataError(f"the prepared dataset cannot be written: {error.strerror}", where=planned.root) from None


@contextmanager
def locked(root: str, name: str, *, handle: Handle | None = None) -> Iterator[bool]:
    """Lock a prepared dataset, so that two preparations on one file system take turns. Remote ones have no lock, and
    write the same objects.

    Args:
        root: parent of prepared datasets.
        name: of the dataset.
        handle: called before waiting for another process; None does not wait, and yields False.
    """
    if is_url(root):
        yield True
        return
    from filelock import FileLock, Timeout

    try:
        locks = Path(root) / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{name}.lock")
        try:
            lock.acquire(timeout=0 if handle is None else _PATIENCE_S)
        except Timeout:
            if handle is not None:
                handle(Note("another process is preparing the same data; waiting for it"))
                lock.acquire()
        try:
            yield lock.is_locked
        finally:
            lock.release()
    except OSError as error:
        raise DataError(f"the prepared dataset cannot be written: {error.strerror or error}", where=root) from None
