"""finray's half of the preparation benchmark: a file of rows prepared on Ray, as `finray prepare` does it.

What it measures, apart from each other:

* `start_seconds`: connecting, which here starts Ray on this machine;
* `prepare_seconds`: from the config to a prepared dataset on disk, nothing of it cached, with Ray up but none of its
  workers started;
* `plan_seconds`: planning the packs of all rows, which `finray train` does when it begins;
* `warm`: the same config once more, now that it is prepared: finding the dataset, opening it, planning its packs and
  making the first batch, as a training process does before its first step. Imports are done by then, and Ray has ended.

What it does not measure: memory (the caller does), and training.

Needs finray. Example:

    python finray_prepare.py --model DIR --rows rows.jsonl --work /tmp/empty
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from finray.config.load import build_config
from finray.config.schema import Config
from finray.data.dataset.prepare import is_prepared, start_preparation
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.sampling.order import Order
from finray.data.sampling.packing import PackPlan, plan_packs
from finray.planning.placement import worker_environment
from finray.runtime import cluster as clusters
from finray.runtime.prepare import prepare_on_ray
from finray.training.loader import Feed


def _seconds_since_process_start() -> float:
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Laps:
    """Seconds of one thing after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def make_config(options: argparse.Namespace) -> Config:
    plain: dict[str, Any] = {
        "run": {"name": "benchmark", "output_dir": str(options.work.absolute()), "seed": options.seed},
        "model": {"name": str(options.model.absolute())},
        "data": {"source": str(options.rows.absolute()), "max_length": options.max_length, "packing": True},
        "cluster": {"use_gpu": False},
    }
    if options.workers is not None:
        plain["prepare"] = {"num_workers": options.workers}
    return build_config(plain, source="benchmark")


def open_and_plan(config: Config, prepared: str) -> tuple[PreparedSplit, PackPlan]:
    split = PreparedDataset(prepared).splits(config.data, seed=config.run.seed).train
    return split, plan_packs(split.lengths, config.data.max_length)


def first_batch(config: Config, split: PreparedSplit, plan: PackPlan) -> int:
    """Tokens of the first step's data, which are read for it."""
    order = Order(len(plan), seed=config.run.seed)
    size = config.train.global_batch_size
    feed = Feed(split, plan, order, global_batch_size=size, micro_batch_size=1, rank=0, world_size=1)
    data = feed.at(0)
    return sum(int(batch.tokens_1T.ne(-1).sum()) for _, batch in data.shares)


def measure_warm(config: Config, prepared: str) -> dict[str, float]:
    """Seconds from a config whose data is prepared to the first batch; without Ray, which has ended."""
    laps = Laps()
    if is_prepared(config) != prepared:
        raise RuntimeError("what was prepared is not found again")
    found = laps.lap()
    split, plan = open_and_plan(config, prepared)
    opened = laps.lap()
    first_batch(config, split, plan)
    return {"find": found, "open_and_plan": opened, "first_batch": laps.lap()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    config = make_config(options)
    laps = Laps()
    with clusters.connected(config.cluster) as ray:
        env = worker_environment(config.cluster, threads=1)
        start_seconds = laps.lap()
        with start_preparation(config) as preparation:
            prepared = prepare_on_ray(ray, preparation, env=env)
        prepare_seconds = laps.lap()
        split, plan = open_and_plan(config, prepared)
        plan_seconds = laps.lap()
        process_seconds = _seconds_since_process_start()
    return {
        "rows": len(split),
        "tokens": int(split.lengths.sum()),
        "fill": plan.fill,
        "learned": int(split.supervised.sum()),
        "seconds": prepare_seconds + plan_seconds,
        "start_seconds": start_seconds,
        "prepare_seconds": prepare_seconds,
        "plan_seconds": plan_seconds,
        "process_seconds": process_seconds,
        "warm": measure_warm(config, prepared),
        "versions": {name: version(name) for name in ("finray", "ray", "tokenizers", "pyarrow")},
    }


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rows prepared by finray on Ray, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--work", type=Path, required=True, help="empty directory for what is prepared")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--workers", type=int, help="workers that tokenize; default: finray's own choice")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    print(json.dumps(run(parse_options(argv))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
