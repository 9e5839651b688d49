"""finray's half of the CPU training benchmark: the same LoRA fine-tuning as `trl_sft.py`, in finray's own loop.

What it measures: the optimizer steps after the first `--warmup-steps`. Over that span it gives real tokens a second,
CPU seconds a token and, for every step from the first on, the loss; beside that the process's peak resident memory
and the seconds from its start to the end of its first optimizer step (imports, tokenizing, loading, that step). A
step's seconds run from its record to the next one's, so they hold everything the loop does: waiting for data,
forward, backward, clipping, AdamW, and its three trackers (metrics.jsonl, TensorBoard, notification) at every step.

With `--limit` the model's matrix products are timed afterwards, and what a token costs is counted (`harness/flops.py`).
With `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in the environment this is one of several processes that
share the steps over gloo; tokens and seconds are then those of all together, CPU seconds and memory this one's.

What it does not measure: the checkpoint at the end, evaluation, generation, accelerators, or how well the trained
model answers. It sets no thread counts and no allocator settings: those belong to the caller.

Without `--through-ray` there is no Ray: the loop is put together by `finray.training.assemble` in this process. With
it, `finray.runtime.driver.train` runs the same config in one Ray Train worker, whose environment is finray's own and
whose threads are `OMP_NUM_THREADS`; the CPU seconds of that other process are not read and come out as null.

A step without `--packing` is `--batch-size` rows, as in TRL; with it, `--packs` packs of up to `--max-length` tokens.
Where `--steps` is left out, there are as many after the warm-up as one epoch has. finray has no order but its own
seeded one; `--sequential` therefore hands it the rows so rearranged that this order brings back the file's, and proves
afterwards that every step saw the rows it should have.

Needs finray. Example:

    OMP_NUM_THREADS=2 python finray_sft.py --model DIR --rows rows.jsonl --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
from finray.training.snapshot import restore_weights
from finray.training.strategies import strategy_of
from limit import limit_of
from measuring import cpu_seconds, peak_rss_bytes, seconds_since_process_start

from finray.config.load import build_config
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sampling.order import permutation
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.tracking.jsonl import FILE as METRICS_FILE
from finray.tracking.jsonl import read_records
from finray.training.assemble import Assembled, assemble

Record = dict[str, Any]
RUN_NAME = "benchmark"


@dataclass
class StepWatch:
    """Reads this process's CPU clock and peak memory at every record of the loop; before any checkpoint is written.

    It is one of the loop's trackers, on every rank, and in a run through Ray what is shown the records.
    """

    startup_seconds: float = 0.0
    peak_rss_bytes: int = 0
    cpu_marks: list[float] = field(default_factory=list)

    def log(self, record: Record) -> None:
        if record["kind"] != "train":
            return
        if not self.cpu_marks:
            self.startup_seconds = seconds_since_process_start()
        self.cpu_marks.append(cpu_seconds())
        self.peak_rss_bytes = peak_rss_bytes()

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Outcome:
    """What one of the two ways of running leaves behind.

    Attributes:
        run_dir: directory with the records.
        startup_seconds: from the start of this process to the end of the first step.
        cpu_seconds: of the timed steps; None where another process did them.
        peak_rss_bytes: of the process that trained.
        settings: what the run was made with.
        phases: seconds by phase, where finray's driver measured them.
        limit: what a token costs and what the machine can do, where that was measured.
    """

    run_dir: Path
    startup_seconds: float
    cpu_seconds: float | None
    peak_rss_bytes: int
    settings: dict[str, Any]
    phases: dict[str, float]
    limit: dict[str, Any] = field(default_factory=dict)


def _read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def rearranged(lines: Sequence[str], seed: int) -> list[str]:
    """The rows so ordered that finray's first epoch visits them as they were given."""
    order = permutation(len(lines), "epoch", seed, 0)
    result = [""] * len(lines)
    for position, row in enumerate(order.tolist()):
        result[row] = lines[position]
    return result


def _rows_file(options: argparse.Namespace, folder: Path) -> Path:
    """The rows as finray is to read them."""
    if not options.sequential:
        return Path(options.rows).absolute()
    target = folder / "rows.jsonl"
    target.write_text("\n".join(rearranged(_read_lines(options.rows), options.seed)) + "\n", encoding="utf-8")
    return target


def make_config(options: argparse.Namespace, rows: Path, folder: Path, *, steps: int) -> Config:
    """The same work as `trl_sft.py`: its optimizer, schedule, clipping, adapter and masking."""
    batch = 1 if options.packing else options.batch_size
    workers = ranks()
    plain: dict[str, Any] = {
        "run": {"name": RUN_NAME, "output_dir": str(folder / "runs"), "seed": options.seed},
        "model": {"name": str(options.model.absolute())},
        "adapter": {"rank": options.rank, "alpha": 2.0 * options.rank, "target_modules": "all-linear"},
        "data": {
            "source": str(rows),
            "train_on": "last_assistant",
            "max_length": options.max_length,
            "packing": options.packing,
        },
        "train": {
            "max_steps": steps,
            "global_batch_size": batch * options.packs,
            "micro_batch_size": batch,
            "learning_rate": options.lr,
            "schedule": options.schedule,
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
            "precision": options.precision,
        },
        "checkpoint": {"every_steps": steps + 1},
        "parallel": {"strategy": options.strategy},
        "tracking": {"record_samples": True},
        "cluster": {
            "num_workers": workers,
            "cpus_per_worker": torch.get_num_threads(),
            "use_gpu": False,
            "max_failures": 0,
        },
    }
    return build_config(plain, source="benchmark")


def steps_of_an_epoch(config: Config, prepared: str) -> int:
    """Optimizer steps in which every row is seen once."""
    split = PreparedDataset(prepared).splits(config.data, seed=config.run.seed).train
    plan = (plan_packs if config.data.packing else one_row_each)(split.lengths, config.data.max_length)
    return -(-len(plan) // config.train.global_batch_size)


def with_steps(config: Config, steps: int) -> Config:
    """The config for another number of steps."""
    train = config.train.model_copy(update={"max_steps": steps})
    checkpoint = config.checkpoint.model_copy(update={"every_steps": steps + 1})
    return config.model_copy(update={"train": train, "checkpoint": checkpoint})


def _settings_used(assembled: Assembled) -> dict[str, Any]:
    """What the run was made with, read back from the loop and not from what was asked for."""
    task: Any = assembled.loop.task
    trainable = list(assembled.loop.optimizer.parameters.values())
    return {
        "attention": task.model.config._attn_implementation,
        "base_dtype": str(task.model.get_input_embeddings().weight.dtype),
        "adapter_dtype": str(trainable[0].dtype),
        "trainable_parameters": sum(parameter.numel() for parameter in trainable),
        "threads": torch.get_num_threads(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "through_ray": False,
    }


def run_here(config: Config, prepared: str, options: argparse.Namespace) -> Outcome:
    """Train in this process, without Ray; in as many as there are ranks."""
    run_dir = Path(config.run.output_dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    watch = StepWatch()
    strategy = strategy_of(config, torch.device("cpu"))
    assembled = assemble(config, prepared=prepared, run_dir=run_dir, strategy=strategy)
    assembled.loop.trackers.append(watch)
    if options.start is not None:
        restore_weights(options.start, assembled.loop.task)
    try:
        assembled.loop.run()
    finally:
        for tracker in assembled.loop.trackers:
            tracker.close()
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported in a run that is to be without it")
    cpu_seconds = watch.cpu_marks[-1] - watch.cpu_marks[options.warmup_steps - 1]
    settings = _settings_used(assembled)
    strategy.broadcast_object(None)  # Nobody reads the records, or times anything, before everybody is done.
    limit = limit_of(config, prepared, assembled, run_dir, warmup=options.warmup_steps) if options.limit else {}
    return Outcome(run_dir, watch.startup_seconds, cpu_seconds, watch.peak_rss_bytes, settings, {}, limit)


def run_through_ray(config: Config) -> Outcome:
    """Train in one Ray Train worker, as `finray train` does."""
    from finray.runtime.driver import train

    watch = StepWatch()
    result = train(config, handle=watch.log)
    settings = {"threads": config.cluster.cpus_per_worker, "through_ray": True, "ray": version("ray")}
    peak = int(result.summary["peak_memory_bytes"][0])
    return Outcome(result.run_dir, watch.startup_seconds, None, peak, settings, result.summary["phases"])


def step_seconds(run_dir: Path) -> list[float]:
    """Seconds from each step's record to the next one's, by the times in the TensorBoard events.

    The first number belongs to the second step: nothing says when the first began.
    """
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    times = [event.wall_time for event in events.Scalars("train/loss")]
    return [later - earlier for earlier, later in pairwise(times)]


def require_order(records: Sequence[Record], *, count: int, batch_size: int, seed: int) -> None:
    """Raise unless step k saw the rows from `k * batch_size` on of the file as it was given."""
    order = permutation(count, "epoch", seed, 0).tolist()
    for step, record in enumerate(records):
        if record["samples"] != order[step * batch_size : (step + 1) * batch_size]:
            raise RuntimeError(f"step {step + 1} saw other rows than those of the file's order")


def summarize(options: argparse.Namespace, config: Config, outcome: Outcome) -> dict[str, Any]:
    records = [record for record in read_records(outcome.run_dir / METRICS_FILE) if record["kind"] == "train"]
    if options.sequential:
        count = len(_read_lines(options.rows))
        require_order(records, count=count, batch_size=options.batch_size, seed=options.seed)
    warm, steps = options.warmup_steps, len(records)
    timed = step_seconds(outcome.run_dir)[warm - 1 :]
    tokens = records[-1]["tokens"] - records[warm - 1]["tokens"]
    seconds = sum(timed)
    return {
        "peer": "finray",
        "mode": "through_ray" if options.through_ray else "packed" if options.packing else "rows",
        "precision": options.precision,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_seconds": outcome.cpu_seconds,
        "cpu_seconds_per_token": None if outcome.cpu_seconds is None else outcome.cpu_seconds / tokens,
        "peak_rss_bytes": outcome.peak_rss_bytes,
        "losses": [record["loss"] for record in records],
        "supervised_tokens": sum(record["supervised"] for record in records[warm:]),
        "startup_seconds": outcome.startup_seconds,
        "versions": {name: version(name) for name in ("finray", "torch", "transformers", "peft")},
        "padded_tokens": tokens,
        "steps": steps,
        "warmup_steps": warm,
        "settings": outcome.settings | {"packing": config.data.packing, "schedule": config.train.schedule},
        "step_seconds": timed,
        "seconds_inside_steps": records[-1]["seconds"] - records[warm - 1]["seconds"],
        "phases": outcome.phases,
        "limit": outcome.limit,
    }


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning with finray on a CPU, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, help="optimizer steps in all; default: the warm-up and one epoch")
    parser.add_argument("--warmup-steps", type=int, default=2, help="first steps left out of the timing; at least 1")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step without packing")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--schedule", choices=("linear", "constant"), default="linear")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank; alpha is twice that")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--max-length", type=int, default=1024, help="longest row, and tokens in a pack")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sequential", action="store_true", help="keep the file's row order; needs --no-packing")
    parser.add_argument("--start", type=Path, help="adapter to start from, as `trl_sft.py --save-start` writes it")
    parser.add_argument("--through-ray", action="store_true", help="in a Ray Train worker instead of this process")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="with several ranks")
    parser.add_argument("--packs", type=int, default=1, help="packs (or batches of rows) in a step, over all ranks")
    parser.add_argument("--limit", action="store_true", help="afterwards, also time the model's matrix products")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args(argv)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.warmup_steps < 1 or (options.steps is not None and options.warmup_steps >= options.steps):
        parser.error("--warmup-steps must be at least 1 and less than --steps")
    if options.sequential and options.packing:
        parser.error("packs have no order of rows to keep: --sequential needs --no-packing")
    if options.sequential and options.steps is None:
        parser.error("--sequential needs --steps")
    if options.sequential and options.steps * options.batch_size > len(_read_lines(options.rows)):
        parser.error("--sequential goes through the file once: it has too few rows for --steps")
    if options.start is not None and options.through_ray:
        parser.error("--start is for the run without Ray")
    if options.through_ray and (options.limit or ranks() > 1):
        parser.error("--limit and several ranks are for the run without Ray")


def ranks() -> int:
    """How many processes this one is one of."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="finray_sft_") as name:
        if ranks() == 1:
            return run_in(options, Path(name))
        dist.init_process_group("gloo")
        folder = [name]
        dist.broadcast_object_list(folder, src=0)
        result = run_in(options, Path(folder[0]))
        # The first rank's folder holds everybody's files.
        dist.barrier()
        dist.destroy_process_group()
        return result


def run_in(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = make_config(options, _rows_file(options, folder), folder, steps=options.steps or 1)
    prepared: str | None = None
    if options.steps is None or not options.through_ray:
        prepared = prepare_once(config)
        config = with_steps(config, options.steps or options.warmup_steps + steps_of_an_epoch(config, prepared))
    if options.through_ray or prepared is None:
        outcome = run_through_ray(config)
    else:
        outcome = run_here(config, prepared, options)
    return summarize(options, config, outcome)


def prepare_once(config: Config) -> str:
    """The prepared data, made by the first rank."""
    if ranks() == 1:
        return str(prepare_here(config))
    box = [str(prepare_here(config)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    line = json.dumps(run(options))
    if options.out is not None:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
