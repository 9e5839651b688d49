"""``finray pull``: a run's last pushed checkpoint, as a run directory that the same ``finray train`` continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finray.checkpoint import manifest
from finray.checkpoint.copies import CONFIG_FILE
from finray.checkpoint.store import directory_name
from finray.errors import CheckpointError, ConfigError, HubError
from finray.files import require_writable
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
    require_writable(run.parent)
    scratch = run.with_name(f".tmp-pull-{run.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    # The cache of the Hub holds links.
    shutil.copytree(folder, scratch / directory_name(content["step"]), symlinks=False)
    for file in (folder / RUN / one for one in OF_RUN):
        if file.is_file():
            shutil.copyfile(file, scratch / file.name)
    os.replace(scratch, run)
    return Pulled(run, content["step"], url)
