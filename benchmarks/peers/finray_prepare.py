"""finray's half of the preparation benchmark: a file of rows prepared on Ray, as by `finray prepare`.

It measures separately: `start_seconds`, connecting to Ray, which here starts Ray on this machine; `seconds`, from the
config to a prepared dataset on disk, without any cache, with Ray started but none of its workers, and including
packing, which `finray train` does when it begins; and `warm`, the same config again, now that the data is prepared,
without Ray: finding and opening the dataset, packing it, and making the first batch.

    python finray_prepare.py '{"config": {"model": {"name": "DIR"}, ...}}'
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import finray_api
import measuring


@dataclass(frozen=True)
class PrepareJob:
    """A whole configuration."""

    config: dict[str, Any]


def open_and_plan(config: Any, prepared: str) -> tuple[Any, Any]:
    split = finray_api.PreparedDataset(prepared).splits(config.data, seed=config.run.seed).train
    return split, finray_api.plan_packs(split.lengths, config.data.max_length)


def first_batch(config: Any, split: Any, plan: Any) -> None:
    """The data read for the first step."""
    for item in finray_api.Order(len(plan), seed=config.run.seed).batch(0, config.train.global_batch_size):
        rows = plan.pack(item)
        finray_api.collate([split.row(row) for row in rows], rows)


def main() -> None:
    job: PrepareJob = measuring.job(PrepareJob)
    # As the command does; other checkouts may not.
    with suppress(ImportError):
        from finray.runtime.preload import collect_seldom

        collect_seldom()
    config = finray_api.build_config(job.config, source="benchmark")
    marks = [time.perf_counter()]
    with finray_api.connected(config.cluster) as ray:
        env = finray_api.worker_environment(config.cluster, threads=1)
        marks.append(time.perf_counter())
        prepared = finray_api.prepared_on_ray(ray, config, env)
        split, plan = open_and_plan(config, prepared)
        marks.append(time.perf_counter())
        process_seconds = measuring.seconds_since_process_start()
    # A training run has imported it long before its first batch.
    import torch  # noqa: F401

    warm = [time.perf_counter()]
    if finray_api.is_prepared(config) != prepared:
        raise RuntimeError("what was prepared is not found again")
    warm.append(time.perf_counter())
    split, plan = open_and_plan(config, prepared)
    warm.append(time.perf_counter())
    first_batch(config, split, plan)
    warm.append(time.perf_counter())
    result = {
        "rows": len(split),
        "tokens": int(split.lengths.sum()),
        "learned": int(split.supervised.sum()),
        "fill": plan.fill,
        "start_seconds": marks[1] - marks[0],
        "seconds": marks[2] - marks[1],
        "process_seconds": process_seconds,
        "found": warm[1] - warm[0],
        "opened": warm[2] - warm[1],
        "first_batch": warm[3] - warm[2],
        "warm": warm[3] - warm[0],
    }
    measuring.emit(result, "finray", "ray", "tokenizers", "pyarrow")


if __name__ == "__main__":
    main()
