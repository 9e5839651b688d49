"""Local copies of runs behind a URL: what a command needs is downloaded and verified, what it creates is uploaded.

A command calls :func:`local_copy` once for a path, and then reads files as for any run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from finray.checkpoint import manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import FOLLOWING, RemoteStore, keep_only
from finray.checkpoint.store import ATTEMPT_FILE, directory_name
from finray.config.paths import copy_path, is_url
from finray.errors import CheckpointError
from finray.files import FileKind, replace_bytes

CONFIG_FILE = "config.yaml"
# The value of every `auto` in the config; a continued run keeps these.
RESOLVED_FILE = "resolved.json"
# The run's id for trackers; the same at every start.
RUN_ID = "run_id"
SUMMARY_FILE = "summary.json"
FINAL = "final"
# Created in a finished run's directory by evaluations and reports.
EVALUATION = "evaluation"
MADE = (EVALUATION, "report.html")
# Names the rows that a checkpoint was trained on.
_COUNTERS = "training_state/state.json"
_FILES = FileKind(CheckpointError)
SMALL = (CONFIG_FILE, RESOLVED_FILE, SUMMARY_FILE, ATTEMPT_FILE, *FOLLOWING)


def local_copy(run: str | Path, *, weights: bool = True, local_dir: str | None = None) -> str | Path:
    """A local path for a run, its ``final/`` or a checkpoint behind a URL; any other path is returned unchanged.

    Args:
        run: URL of a run, of ``final`` in it, or of one of its checkpoints (``checkpoint-000100``).
        weights: download the model: ``final/``, else the newest valid checkpoint. Without, only what a report shows:
            config, metrics, summary, evaluations.
        local_dir: as ``run.local_dir`` of the config.

    Raises:
        CheckpointError: there is no such run, or it is damaged.
        StorageError: the storage cannot be reached.
    """
    if not is_url(str(run)):
        return run
    url = str(run).rstrip("/")
    parent, _, name = url.rpartition("/")
    inner = name if name == FINAL or name.startswith("checkpoint-") else ""
    objects = Objects(parent if inner else url)
    if objects.read(CONFIG_FILE) is None:
        raise CheckpointError(
            "the run does not exist", where=objects.url, repair="name the URL of a run: <run.output_dir>/<run.name>"
        )
    path = copy_path(objects.url, local_dir)
    path.mkdir(parents=True, exist_ok=True)
    before = _id_of(path)
    pull(path, objects, SMALL)
    if before is not None and before != _id_of(path):
        # Another run is there now: checkpoints of the one before are not its own.
        for folder in path.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)
    if not weights:
        pull(path, objects, objects.files(EVALUATION))
        return path
    store = RemoteStore(path, objects)
    if inner.startswith("checkpoint-"):
        step = next((one for one in store.steps() if inner.startswith(directory_name(one))), None)
        if step is None:
            raise CheckpointError("the checkpoint does not exist", where=url, repair="name the run only")
        store.verify(step)
        return path / directory_name(step)
    has_final = pull_folder(path, objects, FINAL)
    if inner and not has_final:
        raise CheckpointError("the run has no final/ yet", where=url, repair="name the run only")
    if not has_final:
        store.latest()
    else:
        for step in reversed(store.steps()):
            try:
                store.bring(step, _COUNTERS)
            except CheckpointError:
                continue
            break
    return path / inner


def _id_of(run_dir: Path) -> bytes | None:
    file = run_dir / RUN_ID
    return file.read_bytes() if file.is_file() else None


def pull(run_dir: Path, objects: Objects, names: Iterable[str]) -> None:
    """Sync small files of a run directory from its URL; files that do not exist there are removed.

    Lines that a continuing run appended locally are kept.

    Raises:
        CheckpointError: a name leads out of the run directory.
    """
    for name in names:
        path, content = _FILES.inside(run_dir, name, where=objects.url), objects.read(name)
        if content is None:
            path.unlink(missing_ok=True)
            continue
        known = path.read_bytes() if path.is_file() else None
        if known == content or (known is not None and name.endswith(".jsonl") and known.startswith(content)):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, content)


def pull_folder(run_dir: Path, objects: Objects, name: str) -> bool:
    """Sync a folder with a manifest from the URL; returns whether there is one.

    Raises:
        CheckpointError: the remote folder is damaged.
    """
    folder, listing = run_dir / name, f"{name}/{manifest.NAME}"
    if (text := objects.read(listing)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    content = manifest.parsed(text, objects.at(listing))
    for one in content["files"]:
        try:
            manifest.verify_files(folder, [one])
        except CheckpointError:
            objects.download(f"{name}/{one['path']}", folder / one["path"], size=one["bytes"], sha256=one["sha256"])
    keep_only(folder, content)
    return True


def push(run_dir: Path, objects: Objects, names: Iterable[str]) -> None:
    """Upload files and folders of a run directory, if they exist."""
    for name in names:
        path = run_dir / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                objects.upload(file, file.relative_to(run_dir).as_posix())


def push_folder(run_dir: Path, objects: Objects, name: str) -> None:
    """Upload a folder with a manifest; the manifest goes last and marks it as complete."""
    content = manifest.read(run_dir / name)
    listing, files = f"{name}/{manifest.NAME}", {f"{name}/{one['path']}" for one in content["files"]}
    objects.remove(listing, *(one for one in objects.files(name) if one not in files))
    push(run_dir, objects, sorted(files))
    push(run_dir, objects, [listing])


def bring_back(run: str | Path, path: str | Path) -> None:
    """Upload what a command created in the local copy of a run (an evaluation, a report).

    Args:
        run: as given by the user.
        path: result of :func:`local_copy` for it.
    """
    if is_url(str(run)):
        folder = Path(path)
        folder = folder if (folder / CONFIG_FILE).exists() else folder.parent
        url = str(run).rstrip("/")
        push(folder, Objects(url if Path(path) == folder else url.rpartition("/")[0]), MADE)


def move_aside(objects: Objects, target: str) -> None:
    """Copy a run to another URL within its storage, then delete the original, so that a kill loses nothing."""
    names = objects.files()
    for name in names:
        objects.copy(name, f"{target}/{name}")
    # First the manifests, which make folders valid, and the config, which makes it a run, last.
    objects.remove(*sorted(names, key=lambda one: (one == CONFIG_FILE, not one.endswith(manifest.NAME))))
