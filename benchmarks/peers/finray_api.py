"""The parts of finray that benchmarks use, here and in older checkouts (`run.py against`); newest location first."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PLACES = {
    "build_config": ["finray.config.load"],
    "prepare_here": ["finray.data.dataset.prepare", "finray.runtime.prepare"],
    "is_prepared": ["finray.data.dataset.prepare", "finray.runtime.prepare"],
    "PreparedDataset": ["finray.data.dataset.prepared", "finray.data.prepared"],
    "collate": ["finray.data.sampling.collate", "finray.data.collate"],
    "plan_packs": ["finray.data.sampling.packing", "finray.data.packing"],
    "Order": ["finray.data.sampling.order", "finray.data.order"],
    "connected": ["finray.runtime.cluster"],
    "worker_environment": ["finray.planning.placement", "finray.runtime.cluster"],
    "keep_freed_memory": ["finray.training.allocator", "finray.training.memory"],
}


def __getattr__(name: str) -> Any:
    """A function or class of finray.

    Raises:
        AttributeError: it is in none of its locations.
    """
    for place in _PLACES.get(name, []):
        parents = [place.rpartition(".")[0], place]
        if all(find_spec(parent) for parent in parents) and hasattr(importlib.import_module(place), name):
            return getattr(importlib.import_module(place), name)
    raise AttributeError(f"this checkout of finray has no {name} where the benchmarks know it to be")


def prepared_on_ray(ray: Any, config: Any, env: dict[str, str]) -> str:
    """Prepare a config's data on Ray; returns its location."""
    prepare = importlib.import_module("finray.runtime.prepare").prepare_on_ray
    try:
        from finray.data.dataset.prepare import start_preparation
    except ImportError:
        return str(prepare(ray, config, env=env))
    # As in the commands; this process loads no model.
    hide: dict[str, Any] = {"hide_torch": True} if "hide_torch" in signature(start_preparation).parameters else {}
    with start_preparation(config, **hide) as preparation:
        return str(prepare(ray, preparation, env=env))


def assembled(config: Any, prepared: str, run_dir: Path) -> Any:
    """The training loop of this process, assembled as in `finray.runtime.worker`."""
    import torch

    from finray.training.assemble import assemble

    device = torch.device("cpu")
    options: dict[str, Any] = {"prepared": prepared, "run_dir": run_dir}
    if find_spec("finray.config.resolved") is None:
        from finray.training.strategies import strategy_of

        return assemble(config, **options, strategy=strategy_of(config, device)).loop
    from finray.parallel import make_strategy
    from finray.planning.placement import Placement, device_of
    from finray.planning.resolve import resolve

    try:
        from finray.models.packing_cache import packing_of
    except ImportError:
        # An earlier checkout.
        from finray.planning.resolve import packing_of

    placement = Placement(int(os.environ.get("WORLD_SIZE", "1")), torch.get_num_threads(), use_gpu=False)
    resolved = resolve(config, placement, device_of(placement), packing=packing_of(config.model))
    known: dict[str, Any] = {}
    if config.model.task == "sequence_classification":
        # As in the driver, when the data is prepared.
        from finray.data.dataset.labels import find_labels
        from finray.data.dataset.prepared import PreparedDataset

        dataset = PreparedDataset(prepared)
        found = find_labels(dataset, dataset.splits(config.data, seed=config.run.seed), config)
        assert found.labels is not None
        known = {"problem": found.labels.problem, "labels": found.labels.names, "class_weights": found.weights}
    if find_spec("finray.data.dataset.run_data") is None:
        # An earlier checkout.
        resolved = replace(resolved, **known)
    else:
        from finray.config.resolved import PreparedRun, Resolved

        sizes = {"global_batch_size": config.train.global_batch_size, "epochs": config.train.epochs or 1.0}
        resolved = Resolved(**vars(resolved), **sizes, **known)
        options["prepared"] = PreparedRun(prepared, resolved)
    return assemble(config, resolved, **options, strategy=make_strategy(config, resolved, device)).loop


def on_every_step(loop: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function when a step is recorded, on every rank; returns a function to call at the end."""
    trackers = loop.trackers
    if isinstance(trackers, list):
        trackers.append(SimpleNamespace(log=lambda record: is_step(record) and call(), close=lambda: None))
        return lambda: [tracker.close() for tracker in trackers] and None
    log = trackers.log

    def logged(record: Any) -> None:
        log(record)
        if is_step(record):
            call()

    trackers.log = logged
    return trackers.finish  # type: ignore[no-any-return]


def is_step(record: Any) -> bool:
    """Whether a record is that of a training step."""
    return bool(record.get("kind") == "train" if isinstance(record, dict) else type(record).__name__ == "TrainRecord")
