"""The run directory: who may write to it, whether it is continued, and the config it was started with."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from finray.config.identity import differences
from finray.config.load import build_config, read_yaml
from finray.config.paths import run_path
from finray.config.redact import redact
from finray.config.schema import Config
from finray.errors import ClusterError, ConfigError

CONFIG_FILE = "config.yaml"
FINAL = "final"
# What every `auto` of the config came to; a continued run keeps to it.
RESOLVED = "resolved.json"
# Ray Train keeps its own list of checkpoints here; finray's manifests are what is believed.
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of a run.

    Attributes:
        path: its directory.
        earlier: the config of its last start, or None where it begins.
    """

    path: Path
    earlier: Config | None = None

    @property
    def config_file(self) -> Path:
        """The config the run was started with."""
        return self.path / CONFIG_FILE

    @property
    def final(self) -> Path:
        """The finished model."""
        return self.path / FINAL

    @property
    def summary_file(self) -> Path:
        """The summary of a finished run; there is none before."""
        return self.path / "summary.json"

    def keep_config(self, config: Config) -> None:
        """Write the config of this start, secrets masked."""
        scratch = self.path / f".{CONFIG_FILE}.{os.getpid()}"
        scratch.write_text(yaml.safe_dump(redact(config.plain()), sort_keys=False), encoding="utf-8")
        os.replace(scratch, self.config_file)

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        scratch = self.path / f".summary.{os.getpid()}"
        scratch.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, self.summary_file)

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """The directory of a config's run."""
        return cls(run_path(config))


@contextmanager
def open_run(config: Config, *, fresh: bool, say: Callable[[str], None], wait_s: float = 15.0) -> Iterator[RunDir]:
    """Take the run directory for this process, and decide whether the run begins or goes on.

    Args:
        config: the run's configuration.
        fresh: move an earlier run of this name aside and begin anew.
        say: told what was done.
        wait_s: seconds to wait for a process that still holds the run (one that is being killed, say).

    Raises:
        ConfigError: the directory holds another run, or cannot be written.
        ClusterError: another process is working on the run.
    """
    run = RunDir.of(config)
    _require_writable(run.path.parent)
    lock = FileLock(run.path.parent / f".{run.path.name}.lock")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise ClusterError(
            "another `finray train` is working on this run",
            where=str(run.path),
            repair="wait for it, stop it, or give this run another name: run.name=...",
        ) from None
    try:
        yield RunDir(run.path, _begin_or_continue(config, run, fresh=fresh, say=say))
    finally:
        lock.release()


def saved_config(run: RunDir) -> Config:
    """The config a run was started with."""
    return build_config(read_yaml(run.config_file), source=str(run.config_file))


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".finray-write-probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the output directory cannot be written: {error.strerror}",
            where=f"run.output_dir={folder}",
            repair="choose another directory with run.output_dir, or mend its permissions",
        ) from None


def _begin_or_continue(config: Config, run: RunDir, *, fresh: bool, say: Callable[[str], None]) -> Config | None:
    """Make the directory ready; returns the config of the run's last start."""
    earlier = None
    if run.path.exists() and fresh:
        aside = _free_name(run.path)
        os.replace(run.path, aside)
        say(f"the earlier run was moved to {aside}")
    if run.config_file.is_file():
        earlier = saved_config(run)
        changed = differences(earlier, config)
        if changed:
            raise ConfigError(
                "the run directory holds a run with another configuration",
                where=str(run.path),
                repair="set these fields back to continue it, choose another run.name, or start anew with --fresh",
                problems=tuple(f"{path}: was {old!r}, is now {new!r}" for path, old, new in changed),
            )
    elif run.path.is_dir() and any(path.name != RAY_SNAPSHOT for path in run.path.iterdir()):
        raise ConfigError(
            f"the directory exists and is no finray run (it has no {CONFIG_FILE})",
            where=str(run.path),
            repair="choose another run.name or run.output_dir; --fresh moves it aside",
        )
    run.path.mkdir(exist_ok=True)
    run.keep_config(config)
    (run.path / RAY_SNAPSHOT).unlink(missing_ok=True)
    for rest in run.path.glob(".tmp-*"):
        shutil.rmtree(rest, ignore_errors=True)
    return earlier


def _free_name(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [
        path.with_name(f"{path.name}.before-{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 100)))
    ]
    return next(candidate for candidate in candidates if not candidate.exists())
