"""Preparation of data on the cluster's CPUs, before any training worker is held.

The source is cut into parts, Ray Data hands them to workers, and each part is written where it belongs by whoever got
it. A manifest, written last, makes a prepared dataset of them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from finray.config.load import build_config
from finray.config.paths import with_absolute_paths
from finray.config.schema import Config
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import (
    Part,
    Settings,
    plan,
)
from finray.data.dataset.prepare import Handle, cleaned, finish, ignore, is_prepared, locked, plan_preparation
from finray.data.storage import Folder
from finray.errors import FinrayError, from_dict
from finray.planning.placement import worker_environment
from finray.pretrained.tokenizers import load_tokenizer, without_torch
from finray.records import PrepareProgress
from finray.runtime import cluster as clusters

# Set where workers do nothing else; also keeps Ray from using their processes for anything else.
_TOKENISES_ONLY = "FINRAY_TOKENISES_ONLY"


def prepare_on_ray(ray: Any, config: Config, *, env: dict[str, str], handle: Handle = ignore) -> str:
    """Prepare the data of a config on the cluster's CPUs; returns the directory or URL of the prepared dataset.

    Args:
        ray: the connected Ray.
        config: of the run.
        env: environment variables of the workers.
        handle: shown records of progress.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    planned = plan_preparation(config)
    if not planned.is_done:
        with locked(planned, handle):
            if not planned.is_done:
                with cleaned(planned):
                    parts = plan(planned.settings, planned.streams)
                    outcomes = _outcomes(ray, config, parts, planned.scratch.root, env=env)
                    finish(planned, config, list(_watched(outcomes, len(parts), handle)))
    return planned.target.root


def prepare(config: Config, *, handle: Handle = ignore) -> str:
    """Prepare the data of a config on the cluster, or on this machine where none is named.

    Returns:
        The directory or URL of the prepared dataset. Ray is not started where it is there already.

    Raises:
        FinrayError: the data, the tokenizer, the storage or the cluster is not right.
    """
    config = with_absolute_paths(config)
    ready = is_prepared(config)
    if ready is not None:
        return ready
    with clusters.connected(config.cluster) as ray:
        env = worker_environment(config.cluster, threads=1)
        return prepare_on_ray(ray, config, env=env, handle=handle)


# --- Ray Data -------------------------------------------------------------------------------------------------------


def _outcomes(
    ray: Any, config: Config, parts: list[Part], root: str, *, env: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The results of all parts, as they come, from a pool of workers."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    _quiet(logging.getLogger("ray.data"))
    cpus = int(ray.cluster_resources().get("CPU", 1))
    # A reference in a list stays one: the parts of a large source are too much for an argument.
    work = [ray.put((config.plain(), parts, root))]
    rows = ray.data.from_items([{"part": number} for number in range(len(parts))], override_num_blocks=len(parts))
    written = rows.map_batches(
        _write_parts,
        batch_size=1,
        fn_args=[work],
        # Tasks and not actors: Ray keeps their processes, so that libraries are loaded once.
        concurrency=max(1, min(len(parts), config.prepare.num_workers or cpus)),
        num_cpus=1,
        # A converter of the user's may want a model.
        runtime_env={"env_vars": {**env, _TOKENISES_ONLY: "0" if config.data.converter else "1"}},
    )
    for row in written.iter_rows():
        outcome = json.loads(row["outcome"])
        if "error" in outcome:
            raise from_dict(outcome["error"])
        yield outcome


def _quiet(logger: logging.Logger) -> None:
    """Ray Data's notes stay in its log file."""
    for handler in logger.handlers:
        if handler.get_name() == "console":
            handler.setLevel(logging.ERROR)


def _write_parts(batch: dict[str, Any], work: list[Any]) -> dict[str, list[str]]:
    """Runs in Ray's workers. Errors are values, because Ray retries what raises."""
    outcomes: list[dict[str, Any]] = []
    for number in batch["part"]:
        try:
            writer, parts = _work(work[0])
            outcomes.append(writer.write(parts[int(number)]))
        except FinrayError as error:
            outcomes.append({"error": error.to_dict()})
    return {"outcome": [json.dumps(outcome) for outcome in outcomes]}


@lru_cache(maxsize=1)
def _work(reference: Any) -> tuple[PartWriter, list[Part]]:
    """The tokenizer and the plan, loaded once in each process."""
    import ray

    plain, parts, root = ray.get(reference)
    config = build_config(plain, source="driver")
    settings = Settings.of(config)
    with without_torch() if os.environ.get(_TOKENISES_ONLY) == "1" else nullcontext():
        tokenizer = load_tokenizer(config.model)
    return PartWriter(settings, settings.encoder(tokenizer), Folder(root)), parts


def _watched(outcomes: Iterable[dict[str, Any]], total: int, handle: Handle) -> Iterator[dict[str, Any]]:
    started = time.perf_counter()
    rows = tokens = 0
    for done, outcome in enumerate(outcomes, start=1):
        rows += outcome["counts"]["source_rows"]
        tokens += outcome["counts"]["tokens"]
        seconds = time.perf_counter() - started
        handle(PrepareProgress(done, total, rows, tokens, seconds))
        yield outcome


# --- putting it together --------------------------------------------------------------------------------------------
