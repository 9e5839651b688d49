"""Checkpoints of one run on disk: written whole or not at all, verified before use, pruned by rule."""

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
from finray.checkpoint.manifest import Content, Entry
from finray.errors import CheckpointError

_NAME = re.compile(r"^checkpoint-(\d{6,})$")
ATTEMPT_FILE = "attempt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; ``files`` are those of its manifest, by their paths in it, and no others are read."""

    path: Path
    step: int
    files: tuple[str, ...] = ()


def directory_name(step: int) -> str:
    """``checkpoint-000100`` for step 100."""
    return f"checkpoint-{step:06d}"


class Fence:
    """Keeps a process that was left over from an earlier attempt from writing into a run that has moved on.

    The run belongs to whoever wrote the attempt file last.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ATTEMPT_FILE
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Take the run over."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._path, self._token)

    def check(self) -> None:
        """Make sure that nobody else has taken the run since.

        Raises:
            CheckpointError: somebody has.
        """
        if self._path.read_text(encoding="utf-8") != self._token:
            raise CheckpointError("another attempt has taken this run over", where=str(self._path.parent))


def replace_text(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees all of the old one or all of the new one."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def fsync(path: Path) -> None:
    """Make a file or directory durable."""
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
        """A directory to fill, by one rank or many.

        Raises:
            CheckpointError: it cannot be made.
        """
        scratch = self.run_dir / f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:8]}"
        with self._storage(step):
            scratch.mkdir(parents=True)
        return scratch

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[Entry]:
        """Write this rank's files and make them durable; returns their entries for the manifest.

        ``fill`` writes into the directory it is given: every rank has one of its own, inside that of :meth:`begin`.

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

    def commit(self, scratch: Path, step: int, entries: list[Entry], *, metrics: dict[str, float]) -> Path:
        """Make a filled directory a checkpoint.

        Raises:
            CheckpointError: another attempt has taken the run over, or storage failed.
        """
        target = self.path_of(step)
        with self._storage(step):
            manifest.write(scratch, entries, step=step, metrics=metrics)
            self._sync(scratch / manifest.NAME)
            for folder in [*(item for item in scratch.rglob("*") if item.is_dir()), scratch]:
                self._sync(folder)
            self._fence()
            if target.exists():
                # Only a damaged checkpoint of this step, or an equal one, can stand here.
                aside = self.run_dir / f".tmp-replaced-{uuid.uuid4().hex[:8]}"
                os.replace(target, aside)
                shutil.rmtree(aside, ignore_errors=True)
            os.replace(scratch, target)
            self._sync(self.run_dir)
        return target

    def abandon(self, scratch: Path) -> None:
        """Remove what is left of a directory that did not become a checkpoint."""
        shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _storage(self, step: int) -> Iterator[None]:
        """Failures of storage as one message; mistakes of our own as they are."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            message = getattr(error, "strerror", None) or str(error)
            # Safetensors hides an OSError in the text of its own.
            if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in message:
                message = "no space left on the device"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {message}",
                where=str(self.path_of(step)),
                repair="make room or mend permissions; the same command then goes on from the last checkpoint",
            ) from None

    # --- what a store behind a URL does otherwise -------------------------------------------------------------------

    # Which share of a checkpoint's files this rank verifies, of how many; None for its share among all ranks.
    share: tuple[int, int] | None = None

    def join(self, scratch: Path) -> None:
        """Get ready to fill a directory that another rank began."""

    def leave(self, scratch: Path) -> None:
        """What this rank does when a directory that it filled has become a checkpoint, or did not."""

    def places(self) -> dict[int, str]:
        """What only rank 0 finds out, for the others."""
        return {}

    def learn(self, places: dict[int, str]) -> None:
        """Take over what rank 0 found out."""

    def bring(self, step: int, name: str) -> Path:
        """A file of a step's checkpoint, on this machine; for the whole of one there is :meth:`require`."""
        return self.path_of(step) / name

    def follow(self) -> None:
        """Bring the other files of the run to where its checkpoints are."""

    # --- finding ----------------------------------------------------------------------------------------------------

    def content(self, step: int) -> Content:
        """What the manifest of a step's checkpoint says.

        Raises:
            CheckpointError: it is missing, cut off or changed.
        """
        return manifest.read(self.path_of(step), step=step)

    def require(self, step: int, files: Sequence[Entry]) -> None:
        """See that files of a step's checkpoint are on this machine, as they were written.

        Raises:
            CheckpointError: names the first that is missing, cut off or changed.
        """
        manifest.verify_files(self.path_of(step), files)

    def verify(self, step: int) -> Content:
        """Both for a whole checkpoint."""
        content = self.content(step)
        self.require(step, content["files"])
        return content

    def set_aside(self, step: int) -> None:
        """Take a damaged checkpoint out of those that are counted."""
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
        set_aside: bool = False,
    ) -> Checkpoint | None:
        """The newest checkpoint whose every file is as it was written.

        Args:
            warn: told about each newer checkpoint that had to be passed over, by file.
            steps: to choose from, the one to take first at the end; those on disk, ascending, when None.
            verify: reads the manifest, and raises for a damaged checkpoint; a group of ranks shares the work.
            set_aside: rename those that were passed over to ``damaged-...``, so that retention does not count them and
                delete good ones in their place.

        Raises:
            CheckpointError: there are checkpoints and all are damaged; starting afresh is the user's decision.
        """
        damage: dict[int, str] = {}
        for step in reversed(self.steps() if steps is None else steps):
            try:
                content = (verify or self.verify)(step)
            except CheckpointError as error:
                damage[step] = str(error)
                warn(f"damaged checkpoint passed over: {error}")
                continue
            for bad in damage if set_aside else ():
                self.set_aside(bad)
            return Checkpoint(self.path_of(step), step, tuple(entry["path"] for entry in content["files"]))
        if damage:
            raise CheckpointError(
                f"every checkpoint of the run is damaged: {'; '.join(damage.values())}",
                where=self.where,
                repair="restore one from a backup, or start anew with --fresh",
            )
        return None

    def best(self, metric: str, mode: str) -> int | None:
        """The step with the best value (``mode``: ``min`` or ``max``) of a metric in the manifests; the earliest of
        equals, and None where no checkpoint has the metric.
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
        """Write metrics that came later into the manifest of a checkpoint; nothing where it is gone or damaged.

        Raises:
            CheckpointError: another attempt has taken the run over, or storage failed.
        """
        path = self.path_of(step)
        try:
            content = manifest.read(path)
        except CheckpointError:
            return
        with self._storage(step):
            self._fence()
            scratch = self.run_dir / f".tmp-manifest-{uuid.uuid4().hex[:8]}"
            scratch.mkdir()
            manifest.write(scratch, content["files"], step=step, metrics={**content["metrics"], **metrics})
            self._sync(scratch / manifest.NAME)
            os.replace(scratch / manifest.NAME, path / manifest.NAME)
            self._sync(path)
            scratch.rmdir()

    def prune(self, *, keep_last: int, best: tuple[str, str] | None, others: Collection[int] = ()) -> list[int]:
        """Delete checkpoints that no rule keeps, and return their steps: kept are the newest, the best if given, and
        ``others``."""
        kept = None if best is None else self.best(*best)
        doomed = [one for one in to_delete(self.steps(), keep_last=keep_last, best=kept) if one not in others]
        for step in doomed:
            shutil.rmtree(self.path_of(step), ignore_errors=True)
        return doomed

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints after a step, from which the run does not go on."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path_of(later), ignore_errors=True)


def to_delete(steps: list[int], *, keep_last: int, best: int | None) -> list[int]:
    """Which of the steps (ascending) retention gives up."""
    kept = {*steps[-keep_last:], best}
    return [step for step in steps if step not in kept]
