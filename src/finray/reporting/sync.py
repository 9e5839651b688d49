"""``finray sync``: sends a run's records to a tracker, even if the run's config has none."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout
from rich.console import Console

from finray.checkpoint.copies import RUN_ID, named_run
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.extensions import load_named
from finray.config.redact import redact, redact_text
from finray.config.trust import require_trusted
from finray.errors import ConfigError, FinrayError, TrainingError, did_you_mean_path
from finray.files import FileKind
from finray.results import Result
from finray.tracking.access import require_access
from finray.tracking.follow import CursorNotKept, Cursors, Followed, Sending, Service

# Seconds without a batch sent after which a service counts as unreachable.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Synced(Result):
    """What was sent to one service, and its web page."""

    tracker: str
    sent: int
    url: str

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"tracker": self.tracker, "sent": self.sent, "url": self.url}

    def print(self, console: Console) -> None:
        """In one line."""
        what = f"sent {self.sent:,} records to {self.tracker}" if self.sent else f"{self.tracker} has every record"
        console.print(f"{what}{f': {self.url}' if self.url else ''}", highlight=False, soft_wrap=True)


def sync_run(run_dir: Path, to: str | None = None) -> list[Synced]:
    """Send the records of a run that services lack.

    Args:
        run_dir: of a started run; it may be finished.
        to: one service; None means those in the run's config.

    Raises:
        FinrayError: there is no such run or service, or it cannot be reached.
    """
    run_dir = Path(named_run(run_dir))
    run = RunDir(run_dir.resolve())
    if not run.path.exists():
        raise ConfigError(
            f"the directory does not exist{did_you_mean_path(run_dir)}",
            where=str(run_dir),
            repair="give a run directory, such as runs/my-run; `finray runs` lists them",
        )
    if not run.config_file.is_file() or not (run.path / RUN_ID).is_file():
        raise ConfigError("the directory holds no run that has started training", where=str(run_dir))
    config = saved_config(run)
    require_trusted(config, "tracking" if to is None else "tracking.mlflow_uri")
    names = [to] if to is not None else config.tracking.trackers
    wanted = {name: load_named("finray.trackers", name, where="--to") for name in names}
    services = {name: kind for name, kind in wanted.items() if isinstance(kind, type) and issubclass(kind, Service)}
    if to is not None and not services:
        raise ConfigError(f"unknown tracker `{to}`", where="--to", repair="use mlflow or wandb")
    if not services:
        raise ConfigError(
            "the run's config has no tracker to send to",
            where=f"{run_dir}: tracking.trackers",
            repair="choose one: --to mlflow",
        )
    changes: dict[str, Any] = {"trackers": list(services)}
    if config.tracking.wandb_mode == "offline":
        # The user already has wandb's offline files.
        changes["wandb_mode"] = "online"
    config = config.model_copy(update={"tracking": config.tracking.model_copy(update=changes)})
    for message in require_access(config.tracking):
        raise TrainingError(message, where=str(run_dir), repair="try again when the server answers")
    run_id = FileKind(TrainingError, repair="delete the file: trackers then see a new run").text(run.path / RUN_ID)
    followed = Followed(run_id, run.path, redact(config.plain()))
    complete = run.finished() is not None
    return [_sync(Sending(name, service(), followed), complete) for name, service in services.items()]


def _sync(sending: Sending, complete: bool) -> Synced:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            sending.catch_up()
            sending.close(complete=complete)
        except BaseException as error:
            failed.append(error)

    try:
        with sending.lock().acquire(timeout=0):
            # In a thread, because a library that waits for a service cannot be interrupted.
            thread = threading.Thread(target=work, name=f"finray-sync-{sending.name}", daemon=True)
            thread.start()
            before = -1
            while thread.is_alive() and sending.sent > before:
                before = sending.sent
                thread.join(PATIENCE_S)
    except Timeout:
        raise ConfigError(
            f"another process is already sending this run to {sending.name}",
            where=str(sending.run.run_dir),
            repair="a training in progress sends its own records; wait for it",
        ) from None
    if not failed and not thread.is_alive():
        return Synced(sending.name, sending.sent, sending.service.url())
    if failed and isinstance(failed[0], FinrayError):
        raise failed[0]
    if failed and isinstance(failed[0], ModuleNotFoundError):
        raise ConfigError(
            f"a package for {sending.name} is not installed: {failed[0]}",
            where="--to",
            repair=f"pip install 'finray[{sending.name}]'",
        )
    if failed and isinstance(failed[0], CursorNotKept):
        raise TrainingError(
            f"{sending.name} has got records, which cannot be written down: {str(failed[0]).lower()}",
            where=str(Cursors(sending.run.run_dir, sending.name).path),
            repair="free some disk space or fix the permissions; the same command then sends these records again",
        )
    why = f"no answer for {PATIENCE_S:.0f} s"
    if failed:
        why = f"{type(failed[0]).__name__}: {redact_text(str(failed[0]))[:300]}"
    raise TrainingError(
        f"{sending.name} did not accept the records: {why}",
        where=str(sending.run.run_dir),
        repair="try again; records that it has are not sent twice",
    )
