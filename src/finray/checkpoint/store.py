"""Checkpoints of one run on disk: written whole or not at all, verified before use, pruned by rule."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.checkpoint import manifest
from finray.errors import CheckpointError

_NAME = re.compile(r"^checkpoint-(\d{6,})$")
BEST_METRIC = "eval_loss"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its directory, optimizer step and metrics."""

    path: Path
    step: int
    metrics: dict[str, float]


def directory_name(step: int) -> str:
    """``checkpoint-000100`` for step 100."""
    return f"checkpoint-{step:06d}"


class CheckpointStore:
    """Reads and writes the checkpoints of a run directory.

    Args:
        run_dir: the run directory.
        fence: called before a checkpoint becomes visible; raises when another attempt has taken the run over.
        sync: makes a written file durable; replaced in tests.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        fence: Callable[[], None] = lambda: None,
        sync: Callable[[Path], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._fence = fence
        self._sync = _fsync if sync is None else sync

    def write(self, step: int, fill: Callable[[Path], None], *, metrics: dict[str, float]) -> Path:
        """Write a checkpoint at once: :meth:`begin`, :meth:`fill`, :meth:`commit`.

        Raises:
            CheckpointError: it could not be written; nothing of it is left, and earlier checkpoints are untouched.
        """
        scratch = self.begin(step)
        try:
            return self.commit(scratch, step, self.fill(scratch, step, fill), metrics=metrics)
        finally:
            self.abandon(scratch)

    def begin(self, step: int) -> Path:
        """A directory to fill, by one rank or many.

        Raises:
            CheckpointError: it cannot be made.
        """
        scratch = self.run_dir / f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:8]}"
        with self._storage(step):
            scratch.mkdir(parents=True)
        return scratch

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[dict[str, Any]]:
        """Write this rank's files and make them durable; returns their entries for the manifest.

        Args:
            scratch: from :meth:`begin`.
            step: optimizer steps done.
            fill: writes files into the directory it is given; a rank of many gets one of its own.

        Raises:
            CheckpointError: they could not be written.
        """
        own = scratch / f".part-{uuid.uuid4().hex[:8]}"
        entries = []
        with self._storage(step):
            own.mkdir()
            fill(own)
            for path in sorted(item for item in own.rglob("*") if item.is_file()):
                self._sync(path)
                entries.append(manifest.entry(own, path))
                target = scratch / path.relative_to(own)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(own)
        return entries

    def commit(self, scratch: Path, step: int, entries: list[dict[str, Any]], *, metrics: dict[str, float]) -> Path:
        """Make a filled directory a checkpoint.

        Raises:
            CheckpointError: another attempt has taken the run over, or storage failed.
        """
        target = self.run_dir / directory_name(step)
        with self._storage(step):
            manifest.write(scratch, manifest.build(entries, step=step, metrics=metrics))
            self._sync(scratch / manifest.NAME)
            for folder in [item for item in scratch.rglob("*") if item.is_dir()]:
                self._sync(folder)
            self._sync(scratch)
            self._fence()
            self._publish(scratch, target)
        return target

    def abandon(self, scratch: Path) -> None:
        """Remove what is left of a directory that did not become a checkpoint."""
        shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _storage(self, step: int) -> Iterator[None]:
        """Failures of storage as one message; mistakes of our own as they are."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CheckpointError):
                raise
            if (message := _write_failure(error)) is None:
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {message}",
                where=str(self.run_dir / directory_name(step)),
                repair="make room or mend permissions; the same command then goes on from the last checkpoint",
            ) from None

    def steps(self) -> list[int]:
        """Steps of all directories named like checkpoints, valid or not, ascending."""
        if not self.run_dir.is_dir():
            return []
        matches = (_NAME.match(path.name) for path in self.run_dir.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def latest(self, warn: Callable[[str], None], *, set_aside: bool = False) -> Checkpoint | None:
        """The newest checkpoint whose every file is as it was written.

        Args:
            warn: told about each newer checkpoint that had to be passed over, by file.
            set_aside: rename those that were passed over to ``damaged-...``, so that retention does not count them.

        Raises:
            CheckpointError: there are checkpoints and all are damaged; starting afresh is the user's decision.
        """
        damage: dict[int, str] = {}
        for step in reversed(self.steps()):
            path = self.run_dir / directory_name(step)
            try:
                content = manifest.verify(path)
            except CheckpointError as error:
                damage[step] = str(error)
                warn(f"damaged checkpoint passed over: {error}")
                continue
            for bad in damage if set_aside else ():
                self._set_aside(bad)
            return Checkpoint(path, step, content["metrics"])
        if damage:
            raise CheckpointError(
                f"every checkpoint of the run is damaged: {'; '.join(damage.values())}",
                where=str(self.run_dir),
                repair="restore one from a backup, or start anew with --fresh",
            )
        return None

    def best(self) -> int | None:
        """The step with the lowest evaluation loss, of those that have one."""
        scored = []
        for step in self.steps():
            metrics = self._metrics(step)
            if BEST_METRIC in metrics:
                scored.append((metrics[BEST_METRIC], step))
        return min(scored)[1] if scored else None

    def prune(self, *, keep_last: int, keep_best: bool) -> list[int]:
        """Delete checkpoints that neither rule keeps; returns their steps."""
        doomed = to_delete(self.steps(), keep_last=keep_last, best=self.best() if keep_best else None)
        for step in doomed:
            shutil.rmtree(self.run_dir / directory_name(step), ignore_errors=True)
        return doomed

    def _set_aside(self, step: int) -> None:
        path = self.run_dir / directory_name(step)
        os.replace(path, self.run_dir / f"damaged-{path.name}-{uuid.uuid4().hex[:8]}")

    def _metrics(self, step: int) -> dict[str, Any]:
        try:
            metrics: dict[str, Any] = manifest.read(self.run_dir / directory_name(step))["metrics"]
        except CheckpointError:
            return {}
        return metrics

    def _publish(self, scratch: Path, target: Path) -> None:
        if target.exists():
            # Only a damaged checkpoint of this step, or an equal one, can stand here.
            aside = self.run_dir / f".tmp-replaced-{uuid.uuid4().hex[:8]}"
            os.replace(target, aside)
            shutil.rmtree(aside, ignore_errors=True)
        os.replace(scratch, target)
        self._sync(self.run_dir)


def to_delete(steps: list[int], *, keep_last: int, best: int | None) -> list[int]:
    """Which of the steps (ascending) retention gives up."""
    kept = set(steps[-keep_last:]) | ({best} if best is not None else set())
    return [step for step in steps if step not in kept]


def _write_failure(error: Exception) -> str | None:
    """What went wrong with storage, or None when the error is not storage's. Safetensors hides OSErrors in its own."""
    if isinstance(error, OSError):
        return "no space left on the device" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    if type(error).__name__ == "SafetensorError":
        text = str(error)
        return "no space left on the device" if "os error 28" in text else text
    return None


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
