"""Copies of runs behind a URL on this machine: what a command needs is fetched and verified, what it made goes back.

A command asks :func:`local_copy` once for a path, and then reads files as those of any run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from finray.checkpoint import manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import FOLLOWING, RemoteStore, keep_only
from finray.checkpoint.store import ATTEMPT_FILE, directory_name
from finray.config.paths import copy_path, is_url
from finray.errors import CheckpointError
from finray.files import FileKind

CONFIG_FILE = "config.yaml"
# What every `auto` of the config came to; a continued run keeps to it.
RESOLVED_FILE = "resolved.json"
SUMMARY_FILE = "summary.json"
FINAL = "final"
# What a finished run's evaluations and reports leave in its directory.
EVALUATION = "evaluation"
MADE = (EVALUATION, "report.html")
# Which rows a checkpoint was trained on is there.
_COUNTERS = "training_state/state.json"
_FILES = FileKind(CheckpointError)
SMALL = (CONFIG_FILE, RESOLVED_FILE, SUMMARY_FILE, ATTEMPT_FILE, *FOLLOWING)


def local_copy(
    run: str | Path,
    *,
    weights: bool = True,
    local_dir: str | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> str | Path:
    """A local path for a run, its ``final/`` or a checkpoint behind a URL; anything else as it is.

    Args:
        run: URL of a run, of ``final`` in it, or of one of its checkpoints (``checkpoint-000100``).
        weights: fetch the model: ``final/``, else the newest whole checkpoint. Without, what a report shows: config,
            metrics, summary, evaluations.
        local_dir: as ``run.local_dir`` of the config.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        CheckpointError: there is no such run, or it is damaged.
        StorageError: the storage cannot be asked.
    """
    if not is_url(str(run)):
        return run
    url = str(run).rstrip("/")
    parent, _, name = url.rpartition("/")
    inner = name if name == FINAL or name.startswith("checkpoint-") else ""
    objects = Objects(parent if inner else url)
    if objects.read(CONFIG_FILE) is None:
        raise CheckpointError(
            "there is no run", where=objects.url, repair="name the URL of a run: <run.output_dir>/<run.name>"
        )
    path = copy_path(objects.url, local_dir)
    path.mkdir(parents=True, exist_ok=True)
    pull(path, objects, SMALL)
    if not weights:
        pull(path, objects, objects.files(EVALUATION))
        return path
    store = RemoteStore(path, objects)
    if inner.startswith("checkpoint-"):
        step = next((one for one in store.steps() if inner.startswith(directory_name(one))), None)
        if step is None:
            raise CheckpointError("there is no such checkpoint", where=url, repair="name the run alone")
        store.verify(step)
        return path / directory_name(step)
    has_final = pull_folder(path, objects, FINAL)
    if inner and not has_final:
        raise CheckpointError("the run has no final/ yet", where=url, repair="name the run alone")
    if not has_final:
        store.latest(warn)
    else:
        for step in reversed(store.steps()):
            try:
                store.bring(step, _COUNTERS)
            except CheckpointError:
                continue
            break
    return path / inner


def pull(run_dir: Path, objects: Objects, names: Iterable[str]) -> None:
    """Make small files of a run directory what they are behind its URL; what is not there is removed.

    Lines that were added here to what is there (by a run that goes on) are kept.

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
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_bytes(content)
        os.replace(scratch, path)


def pull_folder(run_dir: Path, objects: Objects, name: str) -> bool:
    """Make a folder with a manifest what it is behind the URL; returns whether there is one.

    Raises:
        CheckpointError: it is damaged there.
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
    """Bring files and folders of a run directory behind its URL, those that there are."""
    for name in names:
        path = run_dir / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                objects.upload(file, file.relative_to(run_dir).as_posix())


def push_folder(run_dir: Path, objects: Objects, name: str) -> None:
    """Bring a folder with a manifest behind the URL: it is there when its manifest is, which goes up last."""
    content = manifest.read(run_dir / name)
    listing, files = f"{name}/{manifest.NAME}", {f"{name}/{one['path']}" for one in content["files"]}
    objects.remove(listing, *(one for one in objects.files(name) if one not in files))
    push(run_dir, objects, sorted(files))
    push(run_dir, objects, [listing])


def bring_back(run: str | Path, path: str | Path) -> None:
    """Bring what a command made in the copy of a run (an evaluation, a report) behind the run's URL.

    Args:
        run: as it was named.
        path: what :func:`local_copy` gave for it.
    """
    if is_url(str(run)):
        folder = Path(path)
        folder = folder if (folder / CONFIG_FILE).exists() else folder.parent
        url = str(run).rstrip("/")
        push(folder, Objects(url if Path(path) == folder else url.rpartition("/")[0]), MADE)


def move_aside(objects: Objects, target: str) -> None:
    """Copy a run to another URL within its storage, and then delete it, so that a kill loses nothing."""
    names = objects.files()
    for name in names:
        objects.copy(name, f"{target}/{name}")
    # What makes something of the rest goes first, and what makes a run of it last.
    objects.remove(*sorted(names, key=lambda one: (one == CONFIG_FILE, not one.endswith(manifest.NAME))))
