"""Local copies of runs behind a URL: what a command needs is downloaded and verified, what it creates is uploaded.

A command calls :func:`local_copy` once for a path, and then reads files as for any run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from finray.checkpoint import manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import FOLLOWING, RemoteStore, keep_only
from finray.checkpoint.store import ATTEMPT_FILE, CheckpointStore, directory_name
from finray.config import RUNS
from finray.config.paths import copy_path, is_url, read_path
from finray.config.trust import RUN_FILES, SIGNATURE
from finray.errors import CheckpointError
from finray.files import FileKind, lies_in, replace_bytes

CONFIG_FILE = "config.yaml"
# The value of every `auto` in the config; a continued run keeps these.
RESOLVED_FILE = "resolved.json"
# The run's id for trackers; the same at every start.
RUN_ID = "run_id"
SUMMARY_FILE = "summary.json"
FINAL = "final"
# One of these is in any directory with a model or an adapter; the last one in that of a checkpoint.
_MODEL_FILES = ("config.json", "adapter_config.json", manifest.NAME)
# Created in a finished run's directory by evaluations.
EVALUATION = "evaluation"
# Stays on the machine of the driver.
FAILURES = "failures.jsonl"
# Names the rows that a checkpoint was trained on.
_COUNTERS = "training_state/state.json"
_FILES = FileKind(CheckpointError)
_RECORDS = FileKind(CheckpointError, limit=2**36)
SMALL = (CONFIG_FILE, SIGNATURE, RESOLVED_FILE, SUMMARY_FILE, ATTEMPT_FILE, *FOLLOWING)
# With the first digits of its attempt, as it is called behind the URL, or without.
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})(-[0-9a-f]{8})?")


def is_run(path: Path) -> bool:
    """Whether a directory holds a run, even an incomplete one."""
    try:
        return path.is_dir() and (
            any((path / name).is_file() for name in (CONFIG_FILE, *RUN_FILES)) or bool(CheckpointStore(path).steps())
        )
    except OSError:
        return False


def named_run(run: str | Path) -> str | Path:
    """The path of a run by its name, as `finray runs` lists it: what is not there is looked for in ``runs/``, and so is
    a directory that holds no run. Anything else is returned unchanged.
    """
    path = Path(run)
    if is_url(str(run)) or path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0].startswith("~"):
        return run
    named = Path(RUNS) / path
    with suppress(OSError, ValueError):
        # A model's directory may have the name of a run, a directory of data has no such file.
        is_other = path.is_dir() and not (is_run(path) or any((path / name).exists() for name in _MODEL_FILES))
        if (is_other or not path.exists()) and (Path(RUNS) / path.parts[0] / CONFIG_FILE).is_file() and named.exists():
            return named
    return run


def local_copy(run: str | Path, *, weights: bool = True) -> str | Path:
    """A local path for a run, its ``final/`` or a checkpoint behind a URL; any other path is returned unchanged.

    Args:
        run: URL of a run, of ``final`` in it, or of one of its checkpoints (``checkpoint-000100``).
        weights: download the model: ``final/``, else the newest valid checkpoint. Without, only what a report shows:
            config, metrics, summary, evaluations.

    Raises:
        CheckpointError: there is no such run, or it is damaged.
        StorageError: the storage cannot be reached.
    """
    if not is_url(str(run)):
        return run
    url = str(run).rstrip("/")
    parent, _, name = url.rpartition("/")
    checkpoint = _CHECKPOINT.fullmatch(name)
    inner = name if name == FINAL or checkpoint else ""
    objects = Objects(parent if inner else url)
    if objects.read(CONFIG_FILE) is None:
        raise CheckpointError(
            "the run does not exist", where=objects.url, repair="name the URL of a run: <run.output_dir>/<run.name>"
        )
    path = read_path(objects.url)
    pull_records(path, objects)
    if not weights:
        pull(path, objects, objects.files(EVALUATION))
        return path
    store = RemoteStore(path, objects)
    if checkpoint:
        step = int(checkpoint[1])
        if step not in store.steps():
            raise CheckpointError("the checkpoint does not exist", where=url, repair="name the run only")
        store.verify(step)
        return path / directory_name(step)
    has_final = pull_folder(path, objects, FINAL, beside=copy_path(objects.url) / FINAL)
    if inner and not has_final:
        raise CheckpointError("the run has no final/ yet", where=url, repair="name the run only")
    if not has_final:
        store.latest()
        # Remove local checkpoints that are no longer at the URL: the newest of all would be loaded.
        store.delete([])
    else:
        for step in reversed(store.steps()):
            try:
                store.fetch_file(step, _COUNTERS)
            except CheckpointError:
                continue
            break
    return path / inner


def pull_records(path: Path, objects: Objects) -> None:
    """Sync what a report shows, except evaluations, into the copy that commands read.

    If the workers run on this machine, newer records and the failures are taken from their copy.
    """
    run_id = path / RUN_ID
    workers_copy = copy_path(objects.url)
    if run_id.is_file() and _FILES.read(run_id) != objects.read(RUN_ID):
        # Another run is there now: nothing of the one before is its own.
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    pull(path, objects, SMALL)
    (path / FAILURES).unlink(missing_ok=True)
    with suppress(OSError, CheckpointError):
        if (
            run_id.is_file()
            and (workers_copy / RUN_ID).is_file()
            and _FILES.read(run_id) == _FILES.read(workers_copy / RUN_ID)
        ):
            for name in (*FOLLOWING, FAILURES):
                if not (workers_copy / name).is_file():
                    continue
                newer = _RECORDS.read(workers_copy / name)
                if not (path / name).is_file() or newer.startswith(_RECORDS.read(path / name)):
                    replace_bytes(path / name, newer)


def pull(run_dir: Path, objects: Objects, names: Iterable[str]) -> None:
    """Sync small files of a run directory from its URL; files that do not exist there are removed.

    Lines that a continuing run appended locally are kept. Raises CheckpointError: a name leads out of the run
    directory.
    """
    for name in names:
        path, content = _FILES.inside(run_dir, name, where=objects.url), objects.read(name)
        if content is None:
            path.unlink(missing_ok=True)
            continue
        local = _RECORDS.read(path, run_dir) if path.is_file() else None
        if local == content or (local is not None and name.endswith(".jsonl") and local.startswith(content)):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, content)


def pull_folder(run_dir: Path, objects: Objects, name: str, *, beside: Path | None = None) -> bool:
    """Sync a folder with a manifest from the URL; returns whether there is one.

    Args:
        run_dir: of the folder.
        objects: the run behind its URL.
        name: of the folder.
        beside: another copy of it on this machine; files that are intact there are linked, not downloaded.

    Raises:
        CheckpointError: the remote folder is damaged.
    """
    folder, listing = run_dir / name, f"{name}/{manifest.NAME}"
    if (text := objects.read(listing)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    content = manifest.parsed(text, objects.at(listing))
    for entry in content["files"]:
        file = folder / entry["path"]
        if _is_intact(folder, entry):
            continue
        if beside is not None and _is_intact(beside, entry):
            # It fails across file systems.
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)
                os.link(beside / entry["path"], file)
                continue
        objects.download(f"{name}/{entry['path']}", file, size=entry["bytes"], sha256=entry["sha256"])
    keep_only(folder, content)
    return True


def _is_intact(folder: Path, entry: manifest.FileEntry) -> bool:
    try:
        manifest.verify_files(folder, [entry])
    except CheckpointError:
        return False
    return True


def push(run_dir: Path, objects: Objects, names: Iterable[str]) -> None:
    """Upload files and folders of a run directory, if they exist."""
    for name in names:
        path = run_dir / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            # A link leads to what is not the run's.
            if file.is_file() and lies_in(file, run_dir):
                objects.upload(file, file.relative_to(run_dir).as_posix())


def push_folder(run_dir: Path, objects: Objects, name: str) -> None:
    """Upload a folder with a manifest; the manifest goes last and marks it as complete.
    Raises CheckpointError: one of its files is missing."""
    content = manifest.verify(run_dir / name, digests=False)
    listing, files = f"{name}/{manifest.NAME}", {f"{name}/{file['path']}" for file in content["files"]}
    objects.remove(listing, *(file for file in objects.files(name) if file not in files))
    push(run_dir, objects, sorted(files))
    push(run_dir, objects, [listing])


def bring_back(run: str | Path, path: str | Path, made: Path) -> None:
    """Upload what a command created in the local copy of a run.

    Args:
        run: as given by the user.
        path: result of :func:`local_copy` for it.
        made: the folder that was created; what others have created beside it may be newer at the URL.
    """
    if is_url(str(run)):
        folder = Path(path)
        folder = folder if (folder / CONFIG_FILE).exists() else folder.parent
        url = str(run).rstrip("/")
        objects = Objects(url if Path(path) == folder else url.rpartition("/")[0])
        push(folder, objects, [file.relative_to(folder).as_posix() for file in made.iterdir() if file.is_file()])


def move_aside(objects: Objects, target: str) -> None:
    """Copy a run to another URL within its storage, then delete the original, so that a kill loses nothing."""
    names = objects.files()
    for name in names:
        objects.copy(name, f"{target}/{name}")
    # First the manifests, which make folders valid, and the config, which makes it a run, last.
    objects.remove(*sorted(names, key=lambda file: (file == CONFIG_FILE, not file.endswith(manifest.NAME))))
