"""Pushes checkpoints during training: only the newest, and none that the Hub refuses."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from finray.checkpoint import manifest
from finray.checkpoint.copies import CONFIG_FILE, RESOLVED_FILE, RUN_ID
from finray.config.adapter_files import with_base
from finray.errors import FinrayError, HubError
from finray.publishing.hub import Commit, Target

FOLDER = "last-checkpoint"
# Within it: the files of the run directory that a run needs to be continued elsewhere.
RUN = "run"
OF_RUN = (CONFIG_FILE, RESOLVED_FILE, RUN_ID)
_SCRATCH = ".tmp-push-"
# Only read by DeepSpeed: as large as the training state, which is pushed.
_LEFT_OUT = ("deepspeed",)


class Uploads(Protocol):
    """The part of :class:`finray.publishing.hub.Hub` that a checkpoint needs."""

    def push(self, target: Target, files: dict[str, Path | bytes], *, message: str, folder: str, only: bool) -> Commit:
        """Upload files and commit them."""
        ...


class CheckpointPusher:
    """Pushes checkpoints from a thread of rank 0, without stopping or delaying the training.

    Args:
        login: creates the Hub connection; called in the thread, with a function that sleeps and returns whether retries
            must stop.
        target: checked when the run was started.
        base: the name of the base model on the Hub, written into an adapter's files; None leaves them unchanged.
        warn: called with message and step if a checkpoint was not pushed.
    """

    def __init__(
        self,
        login: Callable[[Callable[[float], bool]], Uploads],
        target: Target,
        *,
        base: str | None,
        warn: Callable[[str, int], None],
    ) -> None:
        self._login, self._target, self._base, self._warn = login, target, base, warn
        self._changed = threading.Condition()
        self._next: Path | None = None
        # First: no more checkpoints will come, and nothing is retried. Second: stop waiting.
        self._ended, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="finray-push", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path) -> None:
        """Queue a checkpoint, replacing one that waits; its files may be deleted afterwards."""
        scratch = checkpoint.with_name(f"{_SCRATCH}{checkpoint.name}")
        try:
            # Hard links to its files, because retention may delete it.
            shutil.rmtree(scratch, ignore_errors=True)
            for file in sorted(checkpoint.rglob("*")):
                name = file.relative_to(checkpoint)
                if file.is_file() and name.parts[0] not in _LEFT_OUT:
                    (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                    os.link(file, scratch / name)
            for file in (checkpoint.parent / name for name in OF_RUN):
                if file.is_file():
                    (scratch / RUN).mkdir(exist_ok=True)
                    os.link(file, scratch / RUN / file.name)
        except OSError as error:
            self._warn(f"{checkpoint.name} is not pushed: {error.strerror or error}", _step(checkpoint))
            return
        with self._changed:
            superseded, self._next = self._next, scratch
            self._changed.notify()
        if superseded is not None:
            shutil.rmtree(superseded, ignore_errors=True)

    def close(self, *, wait_s: float) -> None:
        """Stop; the current push and a waiting checkpoint may take this long; nothing is retried."""
        with self._changed:
            self._ended.set()
            self._changed.notify()
        self._thread.join(wait_s)
        self._left.set()
        # An unfinished upload ends with the process, and is never committed.
        with suppress(OSError):
            for rest in [self._next] if self._next is not None else []:
                shutil.rmtree(rest)

    def _work(self) -> None:
        hub: Uploads | None = None
        while True:
            with self._changed:
                while self._next is None and not self._ended.is_set():
                    self._changed.wait()
                if self._left.is_set() or (folder := self._next) is None:
                    return
                self._next = None
            step = _step(folder)
            try:
                hub = hub or self._login(self._ended.wait)
                files = _files(folder, self._base)
                hub.push(self._target, files, message=f"Checkpoint of step {step}", folder=FOLDER, only=True)
                self._target = replace(self._target, exists=True)
            except Exception as error:
                # Training continues after any error.
                detail = error.message if isinstance(error, FinrayError) else f"{type(error).__name__}: {error}"
                where = f" ({error.where})" if isinstance(error, HubError) else ""
                # At the end the model itself is pushed, and errors are reported there.
                if not self._ended.is_set():
                    self._warn(
                        f"the checkpoint of step {step} is not pushed: {detail}{where}; training continues", step
                    )
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _files(folder: Path, base: str | None) -> dict[str, Path | bytes]:
    """The files to push of a checkpoint: all, with the base model's public name, those of the run, and a matching
    manifest."""
    content = manifest.read(folder)
    listed = [entry for entry in content["files"] if Path(entry["path"]).parts[0] not in (*_LEFT_OUT, RUN)]
    listed += [manifest.entry(folder, path) for path in sorted((folder / RUN).glob("*"))]
    for name, text in ({} if base is None else with_base(folder, base)).items():
        # A hard link: the checkpoint keeps the file.
        (folder / name).unlink()
        (folder / name).write_text(text, encoding="utf-8")
        listed = [entry if entry["path"] != name else manifest.entry(folder, folder / name) for entry in listed]
    if listed != content["files"]:
        (folder / manifest.NAME).unlink()
        manifest.write(folder, listed, step=content["step"], metrics=content["metrics"])
    return {name: folder / name for name in (*(entry["path"] for entry in listed), manifest.NAME)}
