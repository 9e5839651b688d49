"""The run directory: who may write to it, whether the run is continued, and the config it was started with."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from finray.checkpoint import copies, manifest
from finray.checkpoint.copies import CONFIG_FILE, FINAL, RESOLVED_FILE, SUMMARY_FILE
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import FOLLOWING_FOLDERS, LOGS, PROFILE, RECORDS, TRAINING_LOG, RemoteStore
from finray.checkpoint.store import CheckpointStore
from finray.config import trust
from finray.config.adapter_files import NOTES, read_notes
from finray.config.identity import LENGTH, differences, length
from finray.config.load import build_config, read_yaml
from finray.config.paths import read_path, run_path, run_url
from finray.config.redact import redact_saved
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.config.trust import SIGNATURE
from finray.errors import CheckpointError, ClusterError, ConfigError, FinrayError
from finray.files import FileKind, lines_of, opened, replace_text
from finray.limits import cut
from finray.records import RunSummary

__all__ = ["CONFIG_FILE", "FINAL", "RESOLVED_FILE", "Earlier", "FinishedRun", "RunDir", "open_run", "saved_config"]

# Records the finished model's name on the Hub.
PUSHED_FILE = "pushed.json"
# Folders of a checkpoint that are only needed to resume.
RESUME_ONLY = ("training_state", "deepspeed")
# Ray Train keeps its own list of checkpoints here; finray relies on its manifests.
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
# What a start writes before its first step, beside `logs/`, which stays for people to read.
_BEFORE_STEPS = (*copies.SMALL, *FOLLOWING_FOLDERS, PROFILE, copies.FAILURES, RAY_SNAPSHOT, "workers.json")

_RESOLVED = FileKind(ConfigError, repair="delete the file; it is then computed again")
_SUMMARY = FileKind(
    CheckpointError, repair="delete the file: the same command then finishes the run again, from its checkpoints"
)


_PUSHED = FileKind(CheckpointError)


class _Summary(TypedDict):
    chosen_step: int
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The summary of a finished run, and the checkpoint that became ``final/``."""

    chosen_step: int
    summary: RunSummary


@dataclass(frozen=True, slots=True)
class Earlier:
    """An existing run that a config would continue."""

    step: int  # of the newest checkpoint; 0 where there is none
    is_finished: bool  # whether nothing is left to be done
    resolved: Resolved | None  # the value of every `auto`; None if no start got that far


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of a run."""

    path: Path  # on this machine
    url: str | None = None  # URL of which ``path`` is the local copy; None if the run is on this machine

    def store(self, *, patient: bool = False) -> CheckpointStore:
        """Its checkpoints; ``patient`` as in :class:`~finray.checkpoint.objects.Objects`."""
        if self.url is None:
            return CheckpointStore(self.path)
        return RemoteStore(self.path, Objects(self.url, patient=patient))

    def pull(self, *, final: bool = False) -> None:
        """Download the run's records, and its finished model if requested."""
        if self.url is not None:
            objects = Objects(self.url)
            self.path.mkdir(parents=True, exist_ok=True)
            copies.pull(self.path, objects, copies.SMALL)
            if final:
                try:
                    copies.pull_folder(self.path, objects, FINAL)
                except CheckpointError:
                    # It can be created again.
                    shutil.rmtree(self.final, ignore_errors=True)

    def push(self, *names: str) -> None:
        """Upload files and folders."""
        if self.url is not None:
            copies.push(self.path, Objects(self.url), names)

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
        """The summary of a finished run; missing before."""
        return self.path / SUMMARY_FILE

    def keep_config(self, config: Config) -> bool:
        """Write the config of this start, secrets masked, and the user's signature of it; returns whether there is
        one."""
        text = yaml.safe_dump(redact_saved(config.plain()), sort_keys=False)
        signature = trust.signature_of(text.encode())
        # Without a signature, the config is read like that of another user.
        (self.path / SIGNATURE).unlink(missing_ok=True)
        replace_text(self.config_file, text)
        if signature is not None:
            replace_text(self.path / SIGNATURE, signature)
        self.push(CONFIG_FILE, SIGNATURE)
        return signature is not None

    def keep_resolved(self, resolved: Resolved) -> None:
        """Write the value of every ``auto`` in the config, for later starts of the run and commands that use it."""
        replace_text(self.path / RESOLVED_FILE, json.dumps(asdict(resolved), indent=2) + "\n")
        self.push(RESOLVED_FILE)

    def resolved(self) -> Resolved | None:
        """The values of every ``auto`` when the run was last started; None for a run that never got that far.
        Raises ConfigError: the file cannot be read."""
        path = self.path / RESOLVED_FILE
        resolved = _RESOLVED.json(path, Resolved) if path.exists() else None
        if resolved is not None and ":" in resolved.strategy != saved_config(self).parallel.strategy:
            # It is imported, and `auto` never resolves to a user's own code.
            raise _RESOLVED.refused(f"names the strategy `{resolved.strategy}`, which its config does not", path)
        return resolved

    def finished(self) -> FinishedRun | None:
        """The summary and chosen step of a finished run; None before.
        Raises CheckpointError: the file cannot be read."""
        path = self.summary_file
        if not path.exists():
            return None
        with _SUMMARY.reading(path):
            plain = _SUMMARY.json(path, _Summary)
            return FinishedRun(plain["chosen_step"], RunSummary.from_json(plain["summary"]))

    def make_final(self, *, best: tuple[str, str] | None, warn: Callable[[str], None]) -> int:
        """Create ``final/`` from a checkpoint, without the files that are only needed to resume.

        Files are hard links if the file system supports them: copying a terabyte of weights would take an hour. The
        manifest of the checkpoint, which is verified first, already has their digests.

        Args:
            best: a metric, and ``min`` or ``max``; None, or a metric that no checkpoint has, chooses the last
                checkpoint.
            warn: called if that one is damaged, and the newest valid one is used instead.

        Returns the step of the chosen checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, or every one is damaged.
        """
        store = self.store()
        if not (steps := store.steps()):
            raise CheckpointError(
                "there is no checkpoint to make final/ from",
                where=store.where,
                repair="restore one from a backup, or start over with --fresh",
            )
        chosen = None if best is None else store.best(*best)
        chosen = steps[-1] if chosen is None else chosen
        source = store.path_of(chosen)
        try:
            content = store.verify(chosen)
        except CheckpointError as error:
            latest = store.latest()
            assert latest is not None
            warn(f"step {latest.step} becomes final, not {chosen}: {error}")
            chosen, source, content = latest.step, latest.path, store.content(latest.step)
        scratch = self.path / f".tmp-final-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        kept = [entry for entry in content["files"] if Path(entry["path"]).parts[0] not in RESUME_ONLY]
        for entry in kept:
            target = scratch / entry["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / entry["path"], target)
            except OSError:
                shutil.copy2(source / entry["path"], target)
        manifest.write(scratch, kept, step=chosen, metrics=content["metrics"])
        if self.final.exists():
            aside = self.path / f"damaged-{FINAL}-{uuid.uuid4().hex[:8]}"
            os.replace(self.final, aside)
            if is_whole(aside):
                shutil.rmtree(aside, ignore_errors=True)
        os.replace(scratch, self.final)
        if self.url is not None:
            copies.push_folder(self.path, Objects(self.url), FINAL)
        return chosen

    def mend_final(self, *, best: tuple[str, str] | None, warn: Callable[[str], None]) -> int | None:
        """Create ``final/`` of a finished run again if it, or one of its files, is missing or truncated.

        Returns the step of the chosen checkpoint; None if nothing had to be done. Raises CheckpointError: there is no
        checkpoint to create it from.
        """
        try:
            manifest.verify(self.final, digests=False)
        except CheckpointError as error:
            chosen = self.make_final(best=best, warn=warn)
            warn(f"{error.where}: {error.message}: final/ is made again from the checkpoint of step {chosen}")
            return chosen
        return None

    def pushed(self) -> dict[str, Any] | None:
        """The last record of :meth:`keep_pushed`; None if nothing was pushed."""
        try:
            return _PUSHED.json(self.path / PUSHED_FILE, dict[str, Any])
        except CheckpointError:
            return None

    def keep_pushed(self, what: dict[str, Any]) -> None:
        """Record what was pushed where, so that it is not pushed again."""
        replace_text(self.path / PUSHED_FILE, json.dumps(what, indent=2) + "\n")

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        replace_text(self.summary_file, json.dumps(outcome, indent=2) + "\n")
        self.push(SUMMARY_FILE)

    def has_begun(self) -> bool:
        """Whether a step was done, so that another configuration would be another run."""
        if (
            self.summary_file.exists()
            or self.final.exists()
            or self.store().steps()
            or any(self.path.glob("damaged-*"))
        ):
            return True
        if not (path := self.path / RECORDS).is_file():
            return False
        try:
            with opened(path, self.path) as stream:
                return any(b'"kind": "train"' in line for line in lines_of(stream))
        except OSError:
            return True

    def forget(self, *, whole: bool = False) -> None:
        """Remove a run that has nothing but its config and logs, which stay; does nothing if it has more. ``whole``
        removes whatever a start writes before its first step, and nothing else."""
        there = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        behind = [] if self.url is None else Objects(self.url).files()
        names = {*there, *(name.partition("/")[0] for name in behind)} - {LOGS}
        doomed = {CONFIG_FILE, SIGNATURE, RAY_SNAPSHOT}
        if whole:
            doomed = {name for name in names if name in _BEFORE_STEPS or name.startswith(("sent-", ".sent-", ".tmp-"))}
        if self.has_begun() or not (whole or names <= doomed):
            return
        if self.url is not None:
            # The config last: without it there is no run.
            first = [name for name in behind if name != CONFIG_FILE and name.partition("/")[0] in doomed]
            Objects(self.url).remove(*first, CONFIG_FILE)
        for path in (self.path / name for name in there if name in doomed):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        with suppress(OSError):
            self.path.rmdir()

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """The directory of a config's run."""
        return cls(run_path(config), run_url(config))


def is_whole(folder: Path) -> bool:
    """Whether a directory has every file of its manifest, with the right size."""
    try:
        manifest.verify(folder, digests=False)
    except CheckpointError:
        return False
    return True


@contextmanager
def open_run(config: Config, *, fresh: bool, notify: Callable[[str], None], wait_s: float = 15.0) -> Iterator[RunDir]:
    """Lock the run directory for this process, and decide whether the run starts or continues.

    Args:
        config: of the run.
        fresh: move an earlier run of this name aside and start over.
        notify: called with messages about what was done.
        wait_s: seconds to wait for a process that still holds the run (one that is being killed, for example).

    Raises:
        ConfigError: the directory holds another run, or cannot be written.
        ClusterError: another process is working on the run.
    """
    run = RunDir.of(config)
    check_output(config)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.path.parent / f".{run.path.name}.lock")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise ClusterError(
            "another `finray train` is running in this run directory",
            where=str(run.path),
            repair="wait for it, stop it, or choose another run.name",
        ) from None
    try:
        if fresh and run.url is not None and (objects := Objects(run.url)).files():
            aside_url = f"{run.url}.before-{time.strftime('%Y%m%d-%H%M%S')}"
            copies.move_aside(objects, aside_url)
            notify(f"the earlier run was moved to {aside_url}")
        if run.path.exists() and fresh:
            stem = f"{run.path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
            names = (stem, *(f"{stem}-{number}" for number in range(2, 100)))
            aside = next(path for path in map(run.path.with_name, names) if not path.exists())
            os.replace(run.path, aside)
            if run.url is None:
                notify(f"the earlier run was moved to {aside}")
        _require_at_url(run)
        run.pull()
        before = _require_same_run(config, run)
        if before is None and run.config_file.is_file():
            run.forget(whole=True)
            notify(
                "an earlier start with other settings left neither a record nor a checkpoint: the run starts with these"
            )
        (was, old), (now, new) = _lengths(before, config, run.resolved())
        is_extended = (was, old) != (now, new)
        steps = run.store().steps()
        kept = (run.config_file, run.path / SIGNATURE, run.summary_file)
        texts = {path: _SUMMARY.text(path) for path in kept if path.exists()}
        try:
            if is_extended:
                notify(
                    f"{was} was {old:,.9g}, {f'{now} is' if now != was else 'is'} now {new:,.9g}: the run continues to "
                    "that step"
                )
                # Without it the run does not count as finished. Before the config: after a kill in between, the same
                # command finds an extension again.
                if run.url is not None:
                    Objects(run.url).remove(SUMMARY_FILE)
                run.summary_file.unlink(missing_ok=True)
            with _writing(run):
                run.path.mkdir(exist_ok=True)
                if not run.keep_config(config):
                    notify(
                        "the run is not signed, because your key (~/.config/finray/key) cannot be made or read: "
                        "commands that use the run may ask for --trust-run"
                    )
            (run.path / RAY_SNAPSHOT).unlink(missing_ok=True)
            for rest in run.path.glob(".tmp-*"):
                shutil.rmtree(rest, ignore_errors=True)
            yield run
        except BaseException as error:
            # A refused start restores what it found, and an extension that added nothing leaves the run finished.
            is_due = isinstance(error, ConfigError) or (is_extended and run.summary_file in texts)
            if before is None:
                # If nothing was begun, a corrected config is no other configuration of this run.
                with suppress(OSError, FinrayError):
                    run.forget()
            elif is_due and not (is_extended and _has_grown(run, steps)):
                for path, text in texts.items():
                    replace_text(path, text)
                with suppress(FinrayError):
                    run.push(*(path.name for path in texts))
            raise
    finally:
        lock.release()


def _has_grown(run: RunDir, steps: Sequence[int]) -> bool:
    """Whether a run has a new summary, or other checkpoints than these; also if its storage does not say."""
    if run.summary_file.exists():
        return True
    try:
        return list(run.store().steps()) != list(steps)
    except FinrayError:
        return True


def _require_at_url(run: RunDir) -> None:
    """Check that a run whose copy has checkpoints is still behind its URL.
    Raises CheckpointError: the URL is empty, but the local copy has checkpoints, which must not be lost silently."""
    if run.url is None:
        return
    if Objects(run.url).read(CONFIG_FILE) is None:
        if run.store().steps():
            raise CheckpointError(
                f"the run has checkpoints, but its {CONFIG_FILE} is missing",
                where=run.url,
                repair="restore it from a backup, or start over with --fresh",
            )
        if CheckpointStore(run.path).steps():
            raise CheckpointError(
                f"there is no run at the URL, but its copy on this machine has checkpoints: {run.path}",
                where=run.url,
                repair="restore the run to that URL, or start over with --fresh, which keeps the copy",
            )


@contextmanager
def _writing(run: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run directory cannot be written: {error.strerror or error}",
            where=str(run.path),
            repair="fix its permissions, or choose another run.name or run.output_dir",
        ) from None


def check_output(config: Config) -> None:
    """Check that the output directory is writable; leaves nothing behind.

    A missing directory is not created: another command that starts at the same time would see it appear and disappear.
    The nearest existing parent is tested instead. Raises ConfigError: it is not writable.
    """
    if (url := run_url(config)) is not None:
        probe_name = f".finray-write-probe-{os.getpid()}"
        folder_there = Objects(url.rpartition("/")[0], tries=2)
        folder_there.write(probe_name, b"probe")
        folder_there.remove(probe_name)
    folder = run_path(config).parent
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        probe = place / f".finray-write-probe-{os.getpid()}"
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the output directory cannot be written: {error.strerror}",
            where=f"run.output_dir={folder}",
            repair="choose another directory with run.output_dir, or fix its permissions",
        ) from None


def saved_config(run: RunDir) -> Config:
    """The config a run was started with; marked (:func:`finray.config.trust.of_stranger`) unless this user did."""
    config = build_config(read_yaml(run.config_file, run.path), source=str(run.config_file))
    return config if trust.is_trusted(run.path) else trust.of_stranger(config, str(run.config_file))


def trust_run(place: str | Path) -> list[str]:
    """The user accepts what a run or a model names; says what that is, one line each. ``place`` is a run, a directory
    or config in one, its URL, or a model directory or Hub id.
    Raises FinrayError: there is no such run, or its config cannot be read."""
    path = Path(copies.local_copy(copies.named_run(place), weights=False)).expanduser()
    lines: list[str] = []
    if not path.exists():
        # Its notes are not here yet.
        trust.accept_all([str(path)])
    config_file = path / CONFIG_FILE
    for file in [path] if path.is_file() else [config_file, path.parent / CONFIG_FILE]:
        # A config beside a model may be one that the user has written.
        if file.is_file() and (file == config_file or trust.is_in_run(file)):
            trust.accept(file)
            brought = trust.brought(saved_config(RunDir(file.parent)))
            lines = [f"trusted, of {file}: {field}: {value}" for field, value in brought]
            break
    for file in (path / NOTES, path / FINAL / NOTES):
        if file.is_file():
            trust.accept(file)
            if ":" in (task := str(read_notes(file.parent).get("task", ""))):
                lines.append(f"trusted, of {file}: task: {task}")
    return lines


def earlier_of(config: Config) -> Earlier | None:
    """The run that a start with this config would continue; None if it would start a new one. Nothing is written.
    Raises ConfigError: the directory holds another run, as for :func:`open_run`."""
    run = RunDir.of(config)
    _require_at_url(run)
    if (url := run.url) is not None:
        # Workers may be writing the run's own copy.
        run = RunDir(read_path(url), url)
        copies.pull_records(run.path, Objects(url))
    before = _require_same_run(config, run)
    if before is None:
        return None
    was, now = _lengths(before, config, chosen := run.resolved())
    steps = run.store().steps()
    return Earlier(steps[-1] if steps else 0, was == now and run.finished() is not None, chosen)


def _lengths(before: Config | None, config: Config, chosen: Resolved | None) -> list[tuple[str, float]]:
    """Planned length of the run before and now, each as in :func:`length`."""
    return [length(saved or config, chosen) for saved in (before, config)]


def _require_same_run(config: Config, run: RunDir) -> Config | None:
    """Refuse a directory that does not hold a run with this configuration, or holds a longer one; returns the
    configuration it was started with, or None if it holds no run, or one with another configuration that never began.
    """
    if run.config_file.is_file():
        chosen, before = run.resolved(), saved_config(run)
        differ = differences(before, config, chosen)
        if differ and not run.has_begun():
            return None
        problems = [f"{path}: was {cut(repr(old))}, is now {cut(repr(new))}" for path, old, new in differ]
        (was, _), (now, steps) = _lengths(before, config, chosen)
        if was != now == "train.max_steps" and (done := run.finished()) is not None:
            had = done.summary.total_steps
            problems += [f"{now}: the run had {had} steps, is now {steps}"] if steps < had else []
        if problems:
            raise other_run(run, *problems, shorter=any(problem.startswith(LENGTH) for problem in problems))
        return before
    there = {path.name for path in run.path.iterdir()} if run.url is None and run.path.is_dir() else set()
    # Of a start that was refused, the log stays.
    there -= {RAY_SNAPSHOT, LOGS if (run.path / LOGS / TRAINING_LOG).is_file() else RAY_SNAPSHOT}
    if there:
        raise ConfigError(
            f"the directory exists but is not a finray run (it has no {CONFIG_FILE})",
            where=str(run.path),
            repair="choose another run.name or run.output_dir; --fresh moves it aside",
        )
    return None


def other_run(run: RunDir, *problems: str, shorter: bool) -> ConfigError:
    """The error for a directory that holds a run with another configuration, with all ways to proceed: ``problems`` are
    the fields that differ, one of which may make the run ``shorter``."""
    repair = "set these fields back to continue it, choose another run.name, or start over with --fresh"
    if run.final.is_dir():
        is_adapter = saved_config(run).adapter.method != "none"
        start = f"adapter.start_from={run.path}" if is_adapter else f"model.name={run.final}"
        repair += f"; under another run.name, {start} starts from what this run has learned"
    if shorter:
        repair += "; a run can be made longer, not shorter"
    return ConfigError(
        "the run directory holds a run with a different configuration",
        where=str(run.path),
        repair=repair,
        problems=problems,
    )
