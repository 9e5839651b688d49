"""Preparing data with the help of a cluster's CPUs, before any training worker is held.

The preparation runs in a thread of this process (:mod:`finray.data.dataset.prepare`). If enough work is left to be
worth starting processes, Ray tasks take parts from the other end of its queue. We use plain tasks and ``ray.wait``
instead of Ray Data: tasks get ranges of files, rows never pass through Ray, and Ray Data has no double-ended queue. Ray
places the tasks, retries lost ones, and reuses their processes, so that libraries and tokenizer are loaded once in
each.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from finray.config.environment import accept, secrets_of
from finray.config.load import build_config
from finray.config.paths import local_dir_of, with_absolute_paths
from finray.config.schema import Config
from finray.config.trust import require_trusted
from finray.data.dataset.export import export_rows
from finray.data.dataset.labels import find_labels
from finray.data.dataset.manifest import PartResult
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import Part, PrepareSettings, remarks_on_files
from finray.data.dataset.prepare import Handle, Preparation, ignore, start_preparation
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.report import report_lines, shared_rows, unserved_ends
from finray.data.storage import Folder
from finray.errors import ClusterError, DataError, FinrayError, from_dict
from finray.planning.placement import worker_environment
from finray.pretrained.tokenizers import generation_stops, load_tokenizer, without_torch
from finray.records import Note
from finray.reporting.run import PreparedData
from finray.runtime import cluster as clusters
from finray.runtime.failures import last_line, lost_process
from finray.runtime.preload import collect_seldom
from finray.runtime.watch import SILENCE_S, waiting_for

# Set if workers only tokenize; also keeps Ray from using their processes for anything else.
_TOKENIZES_ONLY = "FINRAY_TOKENIZES_ONLY"
# A worker takes some four seconds to import and load before it writes its first part.
_WORTH_HELP_S = 10.0
_POLL_S = 0.1
# Cores that this process's thread keeps busy: its Python takes a third of the time of its tokenizer.
_OWN_CPUS = 4


def prepare(config: Config, *, handle: Handle = ignore, hide_torch: bool = False) -> str:
    """Prepare the data of a config, on this machine or with the help of the configured cluster.

    Ray is not started for a dataset that this process can prepare in seconds.

    Args:
        config: defines the data.
        handle: shown records of progress.
        hide_torch: see :func:`finray.data.dataset.prepare.start_preparation`.

    Returns:
        The directory or URL of the prepared dataset.

    Raises:
        FinrayError: a problem with the data, the tokenizer, the storage or the cluster.
    """
    require_trusted(config, "cluster")
    config = with_absolute_paths(config)
    # A converter of the user's may want a model.
    with (
        _note_finished_parts(),
        start_preparation(config, hide_torch=hide_torch and config.data.converter is None) as preparation,
    ):
        while not preparation.wait(_POLL_S, handle=handle):
            if _is_worth_help(preparation):
                with clusters.connected(config.cluster) as ray:
                    env = worker_environment(config.cluster, threads=1)
                    return prepare_on_ray(ray, preparation, env=env, handle=handle)
        return preparation.result()


def prepare_and_report(
    config: Config, *, export_jsonl: str | Path | None = None, handle: Handle = ignore, hide_torch: bool = False
) -> PreparedData:
    """Prepare the data of a config and summarize it; see :func:`prepare`.

    Args:
        config: defines the data.
        export_jsonl: a directory to which the rows are also written as text, by split.
        handle: shown records of progress.
        hide_torch: see :func:`finray.data.dataset.prepare.start_preparation`.

    Raises:
        FinrayError: a problem with the data, the tokenizer, the storage or the cluster.
    """
    location = prepare(config, handle=handle, hide_torch=hide_torch)
    dataset = PreparedDataset(location, local_dir=local_dir_of(config))
    manifest = dataset.manifest
    splits = dataset.splits(config.data, seed=config.run.seed)
    labels = find_labels(dataset, splits, config)
    if labels.problems:
        raise labels.problems[0]
    exported = {} if export_jsonl is None else export_rows(config, location, Path(export_jsonl).expanduser())
    return PreparedData(
        location,
        {name: stats.counts() for name, stats in manifest.splits.items()},
        (
            *report_lines(manifest),
            *unserved_ends(manifest, generation_stops(config.model)),
            *remarks_on_files(with_absolute_paths(config)),
            *shared_rows(splits, dataset.kind(), config),
            *(f"warning: {text} ({where})" for text, where in labels.warnings),
        ),
        {str(path): rows for path, rows in exported.items()},
    )


@contextmanager
def _note_finished_parts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note("finished parts are kept")
        raise


class Helpers:
    """Ray tasks that help a preparation once that is worth it. Leaving the block cancels the preparation.

    Args:
        ray: the connected Ray.
        preparation: a running preparation.
        env: environment variables of the workers.
        cpus: CPUs per task; 0 if training workers already hold all of them.
        handle: shown records of progress.
    """

    def __init__(
        self, ray: Any, preparation: Preparation, *, env: dict[str, str], cpus: int = 1, handle: Handle = ignore
    ) -> None:
        self._ray = ray
        self._preparation = preparation
        self._handle = handle
        # A converter of the user's may want a model.
        threads = {_TOKENIZES_ONLY: "0" if preparation.config.data.converter else "1"}
        self._options = {"num_cpus": cpus, "runtime_env": {"env_vars": {**env, **threads}}}
        self._tasks: dict[Any, Part] = {}
        self._write: Any = None
        self._workers = 0
        self._heard_at = self._say_at = 0.0

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        # Nothing of it is left after the end.
        self._preparation.cancel()
        for reference in self._tasks:
            self._ray.cancel(reference)

    def wait(self) -> None:
        """Help until the data is prepared, or the preparation has failed."""
        while not self.look(_POLL_S):
            pass

    def look(self, timeout: float) -> bool:
        """Hand out parts and collect results, waiting at most ``timeout`` seconds for an event; returns whether the
        preparation has ended. Raises ClusterError: tasks were lost repeatedly."""
        ray, preparation, tasks = self._ray, self._preparation, self._tasks
        if preparation.wait(0 if tasks else timeout, handle=self._handle):
            return True
        if self._write is None and _is_worth_help(preparation):
            self._workers = _workers(ray, preparation.config)
            self._work = ray.put((preparation.config.plain(), preparation.scratch, secrets_of()))
            self._write = ray.remote(**self._options)(_write_part).remote
            self._heard_at = time.monotonic()
            self._say_at = self._heard_at + SILENCE_S
        while len(tasks) < self._workers and (part := preparation.take()) is not None:
            # Ray passes a reference inside a list on as it is: the function fetches it once per process.
            tasks[self._write([self._work], part)] = part
        for reference in ray.wait(list(tasks), timeout=timeout)[0] if tasks else []:
            part, self._heard_at, self._say_at = tasks.pop(reference), time.monotonic(), math.inf
            if (outcome := _outcome(ray, reference)) is None:
                preparation.take_back(part)
            else:
                preparation.give(outcome)
        if tasks and time.monotonic() >= self._say_at:
            self._say_at = math.inf
            if (text := waiting_for(ray, f"{self._workers} CPUs to prepare with")) is not None:
                self._handle(Note(f"{text}; meanwhile only this process works"))
        silent_s = time.monotonic() - self._heard_at
        if self._workers and not preparation.seconds_left and silent_s > preparation.patience_s:
            # Nothing else is left to do here: the requested CPUs may never become free, and a task may hang. A part
            # that is written twice is the same.
            self._workers = 0
            for reference, part in tasks.items():
                preparation.take_back(part)
                ray.cancel(reference, force=True)
            tasks.clear()
        return False


def prepare_on_ray(ray: Any, preparation: Preparation, *, env: dict[str, str], handle: Handle = ignore) -> str:
    """Wait for a preparation with the help of :class:`Helpers`; returns the directory or URL of the prepared
    dataset.
    Raises FinrayError: a problem with the data, the tokenizer or the storage, or tasks were lost repeatedly."""
    with Helpers(ray, preparation, env=env, handle=handle) as helpers:
        helpers.wait()
        return preparation.result(handle=handle)


def _is_worth_help(preparation: Preparation) -> bool:
    wanted = preparation.config.prepare.num_workers
    if wanted is not None:
        return wanted > 1 and preparation.scratch is not None
    if clusters.address_of(preparation.config.cluster) is None and (os.cpu_count() or 1) <= _OWN_CPUS:
        # On this machine only, Ray's workers would merely share the CPUs of this process.
        return False
    return (preparation.seconds_left or 0.0) > _WORTH_HELP_S


def _workers(ray: Any, config: Config) -> int:
    """Number of concurrent tasks: the configured number less this process, else one for each CPU that it leaves
    idle."""
    if config.prepare.num_workers is not None:
        return config.prepare.num_workers - 1
    return max(1, int(ray.cluster_resources().get("CPU", 1)) - min(_OWN_CPUS, os.cpu_count() or 1))


def _outcome(ray: Any, reference: Any) -> PartResult | FinrayError | None:
    """The result of a task; None if it was cancelled."""
    try:
        outcome = ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayError as error:
        lost = lost_process(str(error))
        return ClusterError(
            f"a part could not be prepared on the cluster: {lost[0] if lost else last_line(str(error))}",
            repair="FINRAY_VERBOSE=1 shows the workers' output; the same command continues with the remaining parts",
        )
    return outcome if isinstance(outcome, PartResult) else from_dict(outcome)


def _write_part(work: list[Any], part: Part) -> PartResult | dict[str, Any]:
    """Runs in Ray's workers. Returns errors, because Ray retries what raises."""
    try:
        return _writer(work[0]).write(part)
    except FinrayError as error:
        return error.to_dict()
    except SystemExit as stop:
        # Ray would start the task again and again.
        return DataError(f"code of the tokenizer or the converter ended its process: exit({stop})").to_dict()


@lru_cache(maxsize=1)
def _writer(reference: Any) -> PartWriter:
    """The part writer with its tokenizer, loaded once per process."""
    import ray

    collect_seldom()
    plain, root, secrets = ray.get(reference)
    accept(secrets)
    config = build_config(plain, source="driver")
    settings = PrepareSettings.of(config)
    with without_torch() if os.environ.get(_TOKENIZES_ONLY) == "1" else nullcontext():
        tokenizer = load_tokenizer(config.model)
    return PartWriter(settings, settings.encoder(tokenizer), Folder(root))
