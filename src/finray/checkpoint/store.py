"""Checkpoints of one run on disk: written atomically, verified before use, pruned by retention rules."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from finray.checkpoint import manifest
from finray.checkpoint.manifest import Content, FileEntry
from finray.errors import CheckpointError
from finray.files import opened, replace_text

_NAME = re.compile(r"^checkpoint-(\d{6,})$")
ATTEMPT_FILE = "attempt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; ``files`` are the paths in its manifest, and no others are read."""

    path: Path
    step: int
    files: tuple[str, ...] = ()


def directory_name(step: int) -> str:
    """``checkpoint-000100`` for step 100."""
    return f"checkpoint-{step:06d}"


class Fence:
    """Keeps a leftover process of an earlier attempt from writing into a run that has moved on.

    The run belongs to the process that wrote the attempt file last.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ATTEMPT_FILE
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Take the run over."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._path, self._token)

    def check(self) -> None:
        """Check that no other process has taken over the run since. Raises CheckpointError: another one has."""
        with opened(self._path, self._path.parent) as stream:
            token = stream.read(len(self._token) + 1)
        if token != self._token.encode():
            raise CheckpointError("another process has taken over this run", where=str(self._path.parent))


def fsync(path: Path) -> None:
    """Flush a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointStore:
    """Reads and writes the checkpoints of a run directory.

    Args:
        run_dir: the run directory.
        fence: called before a checkpoint becomes visible; raises when another attempt has taken the run over.
        sync: makes a written file durable; replaced in tests.
    """

    def __init__(
        self, run_dir: Path, *, fence: Callable[[], None] = lambda: None, sync: Callable[[Path], None] = fsync
    ) -> None:
        self.run_dir = run_dir
        self.where = str(run_dir)
        self._fence = fence
        self._sync = sync

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Create a directory to be filled by one or more ranks. Raises CheckpointError: it cannot be created."""
        scratch = self.run_dir / f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:8]}"
        with self._storage(step):
            scratch.mkdir(parents=True)
        return scratch

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[FileEntry]:
        """Write this rank's files and flush them to disk; returns their entries for the manifest.

        ``fill`` writes into the given directory: every rank has its own, inside that of :meth:`begin`. Raises
        CheckpointError: they could not be written.
        """
        part = scratch / f".part-{uuid.uuid4().hex[:8]}"
        entries = []
        with self._storage(step):
            part.mkdir()
            fill(part)
            for path in sorted(item for item in part.rglob("*") if item.is_file()):
                self._sync(path)
                entries.append(manifest.entry(part, path))
                target = scratch / path.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(part)
        return entries

    def commit(self, scratch: Path, step: int, entries: list[FileEntry], *, metrics: dict[str, float]) -> Path:
        """Commit a filled directory as a checkpoint.
        Raises CheckpointError: another attempt has taken the run over, or storage failed."""
        target = self.path_of(step)
        with self._storage(step):
            manifest.write(scratch, entries, step=step, metrics=metrics)
            self._sync(scratch / manifest.NAME)
            for folder in [*(item for item in scratch.rglob("*") if item.is_dir()), scratch]:
                self._sync(folder)
            self._fence()
            if target.exists():
                # Only a damaged checkpoint of this step, or an equal one, can be here.
                aside = self.run_dir / f".tmp-replaced-{uuid.uuid4().hex[:8]}"
                os.replace(target, aside)
                shutil.rmtree(aside, ignore_errors=True)
            os.replace(scratch, target)
            self._sync(self.run_dir)
        return target

    def abandon(self, scratch: Path) -> None:
        """Remove a directory that did not become a checkpoint."""
        shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _storage(self, step: int) -> Iterator[None]:
        """Convert storage errors into one message; bugs of our own pass through."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            message = getattr(error, "strerror", None) or str(error)
            # Safetensors reports an OSError as text.
            if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in message:
                message = "no space left on the device"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {message}",
                where=str(self.path_of(step)),
                repair="free some disk space or fix the permissions; the same command then continues from the last "
                "checkpoint",
            ) from None

    # --- what a store behind a URL does otherwise -------------------------------------------------------------------

    # (index, count) of this rank's share of the files to verify; None for its share among all ranks.
    verify_share: tuple[int, int] | None = None

    def open_part(self, scratch: Path) -> None:
        """Prepare to fill a directory that another rank created."""

    def close_part(self, scratch: Path) -> None:
        """Called after a directory that this rank filled was committed or abandoned."""

    def places(self) -> dict[int, str]:
        """Information that only rank 0 collects, for :meth:`set_places`."""
        return {}

    def set_places(self, places: dict[int, str]) -> None:
        """Take over rank 0's information."""

    def fetch_file(self, step: int, name: str) -> Path:
        """A local file of a step's checkpoint; :meth:`require` gets all files."""
        return self.path_of(step) / name

    def sync_records(self) -> None:
        """Sync the other files of the run to where its checkpoints are."""

    # --- finding ----------------------------------------------------------------------------------------------------

    def content(self, step: int) -> Content:
        """The manifest of a step's checkpoint. Raises CheckpointError: it is missing, truncated or changed."""
        return manifest.read(self.path_of(step), step=step)

    def require(self, step: int, files: Sequence[FileEntry]) -> None:
        """Check that files of a step's checkpoint are on this machine, and intact.
        Raises CheckpointError: names the first that is missing, truncated or changed."""
        manifest.verify_files(self.path_of(step), files)

    def verify(self, step: int) -> Content:
        """Both for all files of a checkpoint."""
        content = self.content(step)
        self.require(step, content["files"])
        return content

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it is no longer counted. Raises CheckpointError: storage failed."""
        with self._storage(step):
            os.replace(self.path_of(step), self.run_dir / f"damaged-{directory_name(step)}-{uuid.uuid4().hex[:8]}")

    def steps(self) -> list[int]:
        """Steps of all directories named like checkpoints, valid or not, ascending."""
        if not self.run_dir.is_dir():
            return []
        matches = (_NAME.match(path.name) for path in self.run_dir.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def path_of(self, step: int) -> Path:
        """The directory of a step's checkpoint."""
        return self.run_dir / directory_name(step)

    def latest(
        self,
        warn: Callable[[str], None] = lambda message: None,
        *,
        steps: Sequence[int] | None = None,
        verify: Callable[[int], Content] | None = None,
        set_aside: Callable[[int], None] = lambda step: None,
    ) -> Checkpoint | None:
        """The newest checkpoint whose files are all intact.

        Args:
            warn: called for each newer checkpoint that was skipped, naming the file.
            steps: candidates, the preferred one last; None means those on disk, ascending.
            verify: reads the manifest, and raises for a damaged checkpoint; a group of ranks shares the work.
            set_aside: called for each that was passed over, to rename it to ``damaged-...``, so that retention does not
                count it and delete a good one in its place.

        Raises:
            CheckpointError: there are checkpoints and all are damaged; starting over is the user's decision.
        """
        damage: dict[int, CheckpointError] = {}
        for step in reversed(self.steps() if steps is None else steps):
            try:
                content = (verify or self.verify)(step)
            except CheckpointError as error:
                damage[step] = error
                # One that says how to repair it is intact, but of another version.
                skipped = "skipped a damaged checkpoint" if error.repair is None else "skipped a checkpoint"
                warn(f"{skipped}: {error.where}: {error.message}")
                continue
            for bad in [other for other, why in damage.items() if why.repair is None]:
                set_aside(bad)
            return Checkpoint(self.path_of(step), step, tuple(entry["path"] for entry in content["files"]))
        if damage:
            if (newest := next(iter(damage.values()))).repair is not None:
                # It is intact, but of another version.
                raise newest
            raise CheckpointError(
                f"all checkpoints of the run are damaged: {'; '.join(str(error) for error in damage.values())}",
                where=self.where,
                repair="restore one from a backup, or start over with --fresh",
            )
        return None

    def best(self, metric: str, mode: str) -> int | None:
        """The step with the best value (``mode``: ``min`` or ``max``) of a metric in the manifests; the earliest if
        several are equal, and None if no checkpoint has the metric.
        """
        scored = []
        for step in self.steps():
            try:
                metrics = self.content(step)["metrics"]
            except CheckpointError:
                continue
            if metric in metrics:
                scored.append((metrics[metric] if mode == "min" else -metrics[metric], step))
        return min(scored)[1] if scored else None

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add later metrics to the manifest of a checkpoint; does nothing if it is gone or damaged.
        Raises CheckpointError: another attempt has taken the run over, or storage failed."""
        try:
            content = self.content(step)
        except CheckpointError:
            return
        scratch = self.run_dir / f".tmp-manifest-{uuid.uuid4().hex[:8]}"
        try:
            with self._storage(step):
                scratch.mkdir()
                manifest.write(scratch, content["files"], step=step, metrics={**content["metrics"], **metrics})
                self._replace_manifest(step, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _replace_manifest(self, step: int, scratch: Path) -> None:
        self._fence()
        self._sync(scratch / manifest.NAME)
        os.replace(scratch / manifest.NAME, self.path_of(step) / manifest.NAME)
        self._sync(self.path_of(step))

    def prune(self, *, keep_last: int, best: tuple[str, str] | None, others: Collection[int] = ()) -> list[int]:
        """Apply retention and return the deleted steps. Kept are the newest, the best if given, and ``others``."""
        kept = None if best is None else self.best(*best)
        doomed = [step for step in to_delete(self.steps(), keep_last=keep_last, best=kept) if step not in others]
        self.delete(doomed)
        return doomed

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints after a step, when the run continues from that step."""
        self.delete([later for later in self.steps() if later > step])

    def delete(self, steps: Collection[int]) -> None:
        """Delete the checkpoints of these steps."""
        for step in steps:
            shutil.rmtree(self.path_of(step), ignore_errors=True)


def to_delete(steps: list[int], *, keep_last: int, best: int | None) -> list[int]:
    """The steps (of the given, ascending) that retention deletes."""
    kept = {*steps[-keep_last:], best}
    return [step for step in steps if step not in kept]
