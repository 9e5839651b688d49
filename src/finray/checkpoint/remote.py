"""Checkpoints of a run behind a URL: written locally, uploaded by every rank in shares, visible once complete.

A checkpoint is in ``checkpoint-000100-<attempt>/``: no two attempts ever write the same object, so a disconnected
attempt that comes back cannot change what a later one has written. Its manifest is uploaded last. Listings of a storage
may be outdated, so ``checkpoints.json`` names the checkpoints, and is read directly by name, as every manifest is; a
listing only adds what was written just before a crash.

The local run directory is a copy: files that are missing or differ are downloaded again.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import TypedDict

from finray.checkpoint import manifest
from finray.checkpoint.manifest import Content, FileEntry
from finray.checkpoint.objects import Objects
from finray.checkpoint.store import ATTEMPT_FILE, CheckpointStore, directory_name
from finray.errors import CheckpointError, StorageError
from finray.files import FileKind, lies_in, opened, replace_text, sealed

INDEX = "checkpoints.json"
# Other files of a run directory that are kept behind the URL: a start, a report or a tracker reads them.
RECORDS = "metrics.jsonl"
FOLLOWING = (RECORDS, "starts.jsonl", "run_id", "sent-wandb.json", "sent-mlflow.json")
FOLLOWING_FOLDERS = ("tensorboard",)
# Folders to which every machine contributes its own files. A rank may be on another machine in the next attempt, so
# logs of two attempts have different names.
PROFILE, LOGS = "profile", "logs"
# The log of the command, among them.
TRAINING_LOG = "training.log"
_NAME = re.compile(r"^checkpoint-(\d{6,})-[0-9a-f]{8}$")
_DAMAGED = "damaged-manifest.json"
_ABANDONED_S = 86_400.0
_INDEX = FileKind(CheckpointError)


class _Place(TypedDict):
    step: int
    folder: str


class _CheckpointIndex(TypedDict):
    checkpoints: list[_Place]


class RemoteStore(CheckpointStore):
    """Reads and writes the checkpoints of a run behind a URL.

    Args:
        run_dir: local run directory.
        objects: the run behind its URL.
        attempt: id of this group of ranks, the same on all; None for readers.
        first: whether this is the rank that commits.
        share: see :class:`CheckpointStore`; among the ranks that see the same ``run_dir``.
    """

    def __init__(
        self,
        run_dir: Path,
        objects: Objects,
        *,
        attempt: str | None = None,
        first: bool = True,
        share: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(run_dir, fence=self.check)
        self.where = objects.url
        self._objects = objects
        self._attempt = attempt or uuid.uuid4().hex
        self._first = first
        self.verify_share = share
        self._known: dict[int, str] | None = None
        self._contents: dict[str, Content] = {}
        # Size and modification time of files when they were last uploaded.
        self._followed: dict[str, tuple[int, int]] = {}

    # --- the fence --------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the run over."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(self.run_dir / ATTEMPT_FILE, self._attempt)
        self._objects.write(ATTEMPT_FILE, self._attempt.encode())

    def check(self) -> None:
        """Check that no other process has taken over the run since. Raises CheckpointError: another one has."""
        if (self._objects.read(ATTEMPT_FILE) or b"").decode(errors="replace") != self._attempt:
            raise CheckpointError("another process has taken over this run", where=self._objects.url)

    def clear(self) -> None:
        """Remove checkpoints that earlier attempts have not finished on this machine: they were killed, or the fence
        keeps them from finishing."""
        for rest in self.run_dir.glob(".tmp-checkpoint-*"):
            shutil.rmtree(rest, ignore_errors=True)

    def clear_url(self) -> None:
        """Delete objects of checkpoints that earlier attempts have not finished, or have deleted in part, if none was
        written within a day: an attempt that has lost the run but still uploads writes newer ones.

        If storage fails, they stay until the next start.
        """
        with suppress(StorageError):
            named = {*self.places().values()}
            for folder in self._objects.folders():
                if not _NAME.match(folder) or folder in named:
                    continue
                if any(self._objects.read(f"{folder}/{name}") is not None for name in (manifest.NAME, _DAMAGED)):
                    continue
                names = self._objects.files(folder)
                if all(self._objects.age_s(name) > _ABANDONED_S for name in names):
                    self._objects.remove(*names)

    # --- writing ----------------------------------------------------------------------------------------------------

    def open_part(self, scratch: Path) -> None:
        """Prepare to fill a directory that another rank created, perhaps on another machine."""
        with self._storage(0):
            scratch.mkdir(parents=True, exist_ok=True)

    def close_part(self, scratch: Path) -> None:
        """On the machine of rank 0 the directory was renamed; on others nothing is kept."""
        shutil.rmtree(scratch, ignore_errors=True)

    def fill(self, scratch: Path, step: int, fill: Callable[[Path], None]) -> list[FileEntry]:
        """Write this rank's files locally, then upload them; returns their entries for the manifest.
        Raises CheckpointError: they could not be written or uploaded."""
        entries = super().fill(scratch, step, fill)
        with _uploading(step, self._objects.url):
            for entry in entries:
                self._objects.upload(scratch / entry["path"], f"{self._folder(step)}/{entry['path']}")
            self.sync_records()
        return entries

    def commit(self, scratch: Path, step: int, entries: list[FileEntry], *, metrics: dict[str, float]) -> Path:
        """Commit what all ranks have uploaded as a checkpoint: the manifest last, then its name in the index.
        Raises CheckpointError: another attempt has taken the run over, or storage failed."""
        folder = self._folder(step)
        with _uploading(step, self._objects.url):
            target = super().commit(scratch, step, entries, metrics=metrics)
            self._objects.upload(target / manifest.NAME, f"{folder}/{manifest.NAME}")
            self._contents[folder] = manifest.read(target)
            # The upload may have taken minutes, and another attempt may have started.
            self.check()
            self._name({**self.places(), step: folder})
        return target

    def sync_records(self) -> None:
        """Upload the other files of the run that have changed since the last call: records by the first rank, each
        machine's own files by the first rank on it.
        Raises CheckpointError: another attempt has taken the run over."""
        paths = [self.run_dir / name for name in FOLLOWING if self._first]
        folders = list(FOLLOWING_FOLDERS) if self._first else []
        folders += [PROFILE, LOGS] if (self._first if self.verify_share is None else self.verify_share[0] == 0) else []
        paths += [path for name in folders for path in (self.run_dir / name).rglob("*")]
        changed = {}
        # A link leads to what is not the run's.
        for path in (path for path in paths if path.is_file() and lies_in(path, self.run_dir)):
            name = path.relative_to(self.run_dir).as_posix()
            stat = path.stat()
            if self._followed.get(name) != (stat.st_size, stat.st_mtime_ns):
                changed[name] = stat.st_size, stat.st_mtime_ns
        if changed:
            self.check()
        for name, signature in changed.items():
            target = f"{LOGS}/{self._attempt[:8]}/{Path(name).name}" if name.startswith(f"{LOGS}/") else name
            # Read in one go: training keeps appending.
            with opened(self.run_dir / name, self.run_dir) as stream:
                self._objects.write(target, stream.read())
            self._followed[name] = signature

    def _folder(self, step: int) -> str:
        return f"{directory_name(step)}-{self._attempt[:8]}"

    def _name(self, places: dict[int, str]) -> None:
        """Write the index."""
        listed: list[_Place] = [{"step": step, "folder": places[step]} for step in sorted(places)]
        self._objects.write(INDEX, json.dumps(sealed({"checkpoints": listed}), indent=2).encode())
        self._known = places

    # --- finding ----------------------------------------------------------------------------------------------------

    def places(self) -> dict[int, str]:
        """Folder of every checkpoint by step, valid or damaged; read once, because no other process writes any."""
        if self._known is None:
            places = {}
            for folder in self._objects.folders():
                # Without a manifest it was never completed; only the index says that it was.
                if (match := _NAME.match(folder)) and self._objects.read(f"{folder}/{manifest.NAME}") is not None:
                    places[int(match.group(1))] = folder
            if (content := self._objects.read(INDEX)) is not None:
                # Without a readable index the listing is used: otherwise the run would be lost.
                with suppress(CheckpointError):
                    index = _INDEX.unsealed(content, _CheckpointIndex, self._objects.at(INDEX))
                    places |= {
                        item["step"]: item["folder"] for item in index["checkpoints"] if _NAME.match(item["folder"])
                    }
            self._known = places
        return self._known

    def set_places(self, places: dict[int, str]) -> None:
        """Take over rank 0's result, because two listings may differ."""
        self._known = dict(places)

    def steps(self) -> list[int]:
        """Steps of all checkpoints behind the URL, valid or not, ascending."""
        return sorted(self.places())

    def content(self, step: int) -> Content:
        """The manifest of a step's checkpoint. Raises CheckpointError: it is missing, truncated or changed."""
        folder = self.places()[step]
        if folder not in self._contents:
            name = f"{folder}/{manifest.NAME}"
            if (text := self._objects.read(name)) is None:
                raise CheckpointError("is missing", where=self._objects.at(name))
            self._contents[folder] = manifest.parsed(text, self._objects.at(name), step=step)
        return self._contents[folder]

    def require(self, step: int, files: Sequence[FileEntry]) -> None:
        """Download files that are missing locally or differ.
        Raises CheckpointError: names the first file that is missing, truncated or changed behind the URL;
        StorageError: the storage cannot be reached, which says nothing about the checkpoint."""
        folder = self.places()[step]
        for entry in files:
            try:
                manifest.verify_files(self.path_of(step), [entry])
            except CheckpointError:
                path = self.path_of(step) / entry["path"]
                try:
                    self._objects.download(
                        f"{folder}/{entry['path']}", path, size=entry["bytes"], sha256=entry["sha256"]
                    )
                except OSError as error:
                    raise StorageError(
                        f"cannot be fetched: {error.strerror or error}", where=str(path), repair="free some disk space"
                    ) from None

    def verify(self, step: int) -> Content:
        """Download a whole checkpoint, and remove any other file from its directory."""
        content = super().verify(step)
        keep_only(self.path_of(step), content)
        return content

    def fetch_file(self, step: int, name: str) -> Path:
        """Download one file of a step's checkpoint. Raises CheckpointError: it is missing or damaged."""
        self.require(step, [entry for entry in self.content(step)["files"] if entry["path"] == name])
        return super().fetch_file(step, name)

    # --- changing ---------------------------------------------------------------------------------------------------

    def set_aside(self, step: int) -> None:
        """Stop listing a damaged checkpoint; its files stay for inspection."""
        folder = self.places()[step]
        if (text := self._objects.read(f"{folder}/{manifest.NAME}")) is not None:
            self._objects.write(f"{folder}/{_DAMAGED}", text)
            self._objects.remove(f"{folder}/{manifest.NAME}")
        self._name({other: place for other, place in self.places().items() if other != step})
        shutil.rmtree(self.path_of(step), ignore_errors=True)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """In the manifest behind the URL."""
        if step in self.places():
            super().add_metrics(step, metrics)

    def _replace_manifest(self, step: int, scratch: Path) -> None:
        folder = self.places()[step]
        with _uploading(step, self._objects.url):
            self.check()
            self._objects.upload(scratch / manifest.NAME, f"{folder}/{manifest.NAME}")
        self._contents[folder] = manifest.read(scratch)

    def delete(self, steps: Collection[int]) -> None:
        """Names first: a kill half-way leaves nothing that looks like a checkpoint. Local copies are removed, too."""
        places = self.places()
        doomed = {step: [manifest.NAME] for step in steps}
        for step, names in doomed.items():
            with suppress(CheckpointError):
                names += [entry["path"] for entry in self.content(step)["files"]]
        if steps:
            with _uploading(max(steps), self._objects.url):
                self._name({step: folder for step, folder in places.items() if step not in steps})
                for step, names in doomed.items():
                    self._objects.remove(*(f"{places[step]}/{name}" for name in names))
        super().delete([step for step in super().steps() if step not in self.places()])


@contextmanager
def _uploading(step: int, url: str) -> Iterator[None]:
    """Convert storage errors into an error about the checkpoint that is being written."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be uploaded: {error.message}",
            where=error.where or url,
            repair=error.repair,
        ) from None


def keep_only(folder: Path, content: Content) -> None:
    """Reduce a directory to the files in a manifest, and write the manifest."""
    listed = {entry["path"] for entry in content["files"]}
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in {*listed, manifest.NAME}:
            path.unlink()
    try:
        is_known = manifest.read(folder) == content
    except CheckpointError:
        is_known = False
    if not is_known:
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write(folder, content["files"], step=content["step"], metrics=content["metrics"])
