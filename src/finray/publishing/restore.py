"""``finray pull``: a run's last pushed checkpoint, as a run directory that the same ``finray train`` continues."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finray.checkpoint import manifest
from finray.checkpoint.copies import CONFIG_FILE
from finray.checkpoint.store import directory_name
from finray.errors import CheckpointError, ConfigError, HubError
from finray.files import hold, opened, remove_abandoned, require_writable
from finray.publishing.background import FOLDER, OF_RUN, RUN
from finray.publishing.hub import Hub
from finray.results import Result


@dataclass(frozen=True, slots=True)
class Pulled(Result):
    """What was brought back.

    Attributes:
        run: the run directory.
        step: of its checkpoint.
        url: of the repository.
    """

    run: Path
    step: int
    url: str

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"run": str(self.run), "step": self.step, "url": self.url}

    def print(self, console: Console) -> None:
        """Where it is, and how it goes on."""
        console.print(f"the checkpoint of step {self.step} of {self.url} is in {self.run}", highlight=False)
        console.print(
            f"  continue it with its config: finray train my-run.yaml run.output_dir={self.run.parent} "
            f"run.name={self.run.name}",
            highlight=False,
            soft_wrap=True,
        )


def pull(name: str, *, output: str | Path, login: Callable[[], Hub] = Hub.login) -> Pulled:
    """Bring back the last checkpoint that a run has pushed to the Hub, and what a run directory needs beside it.

    Args:
        name: of the repository, ``OWNER/NAME``.
        output: the run directory; it may not exist yet.
        login: creates the connection.

    Raises:
        FinrayError: the directory exists, the Hub refuses, or there is no whole checkpoint of a run.
    """
    run = Path(output)
    if run.exists():
        raise ConfigError(
            "the directory exists, and a run in it may be further", where=f"--output {run}", repair="name another one"
        )
    hub = login()
    folder = hub.download(name, FOLDER)
    url = f"{hub.endpoint}/{name}"
    if not (folder / manifest.NAME).is_file() or not (folder / RUN / CONFIG_FILE).is_file():
        raise HubError(
            f"there is no checkpoint of a run: `{FOLDER}/` is missing, or an earlier version of finray pushed it",
            where=url,
            repair="export.push_every_checkpoint pushes it; a finished model is an adapter to continue from: "
            "adapter.start_from",
        )
    try:
        content = manifest.verify(folder)
    except CheckpointError as error:
        raise HubError(f"the checkpoint is damaged: {error.message}", where=url, repair="pull it again") from None
    # On another machine there is no `runs` yet.
    run.parent.mkdir(parents=True, exist_ok=True)
    require_writable(run.parent)
    step, names = content["step"], [entry["path"] for entry in content["files"]]
    if f"{RUN}/{CONFIG_FILE}" not in names:
        raise HubError(
            f"the checkpoint is damaged: its manifest does not list {RUN}/{CONFIG_FILE}",
            where=url,
            repair="push it again",
        )
    remove_abandoned(run.parent, prefix := f".tmp-pull-{run.name}-")
    # Another pull of this name has a directory of its own.
    scratch, lock = run.with_name(f"{prefix}{uuid.uuid4().hex[:8]}"), None
    try:
        scratch.mkdir()
        lock = hold(scratch)
        # Of the manifest's files: nothing has vouched for others, and the cache of the Hub holds links.
        copies = [(name, scratch / directory_name(step) / name) for name in (*names, manifest.NAME)]
        copies += [(f"{RUN}/{name}", scratch / name) for name in OF_RUN if f"{RUN}/{name}" in names]
        for name, target in copies:
            target.parent.mkdir(parents=True, exist_ok=True)
            with opened(folder / name, folder) as source, target.open("xb") as stream:
                shutil.copyfileobj(source, stream, 2**20)
        # It fails where another pull was faster.
        scratch.rename(run)
    except OSError as error:
        reason = "the directory exists by now" if run.exists() else error.strerror or str(error)
        raise HubError(
            f"the checkpoint cannot be written: {reason[0].lower()}{reason[1:]}",
            where=str(run),
            repair="name another directory with --output" if run.exists() else "free some disk space, and pull again",
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return Pulled(run, step, url)
