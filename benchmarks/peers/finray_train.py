"""finray's half of the benchmarks: a training run with finray's own loop.

Without `through_ray`, Ray is not used: the loop runs in this process, or in `WORLD_SIZE` processes that share the steps
over Gloo; tokens and seconds are then totals, CPU seconds and memory those of this process. With it, the run is
`finray.train`, in Ray Train workers with finray's own environment; their CPU seconds are not read.

The seconds of a step are the time between two records in the TensorBoard events, so they include everything the loop
does: waiting for data, forward, backward, clipping, AdamW, and the trackers at every step. CPU time and peak memory are
read at every record, so before the final checkpoint.

    OMP_NUM_THREADS=2 python finray_train.py '{"config": {"model": {"name": "DIR"}, ...}, "warmup": 2}'
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

Record = dict[str, Any]


@dataclass(frozen=True)
class FinrayJob:
    """A run of finray."""

    config: dict[str, Any]  # a complete config, with `tracking.record_samples` if rows are to be counted
    warmup: int = 2  # first steps, not timed
    through_ray: bool = False  # whether to use `finray.train`
    prepared: str | None = None  # prepared data, so that preparation does not add to the memory
    gemm: bool = False  # whether to time the model's matrix products afterwards, on all ranks at once
    turns: list[str] | None = None  # two FIFOs: one is read before a step, the other written after it


def run_here(job: FinrayJob, clock: measuring.Clock) -> dict[str, Any]:
    """Train in this process, as `finray.runtime.worker` does; returns figures that are only available here."""
    import finray_api
    import torch
    import torch.distributed as dist

    config = finray_api.build_config(job.config, source="benchmark")
    # As a worker does; other checkouts may not.
    with suppress(ImportError):
        from finray.runtime.preload import import_all, needed

        import_all(name for name in needed(config) if not name.startswith("ray."))
    returns = config.parallel.strategy != "ddp" or config.train.precision == "bf16-true"
    finray_api.keep_freed_memory(but_large=returns)
    alone = measuring.world_size() == 1
    if not alone or config.parallel.strategy != "ddp":
        dist.init_process_group("gloo")
    here = job.prepared is None and (alone or dist.get_rank() == 0)
    box = [str(finray_api.prepare_here(config)) if here else job.prepared or ""]
    if not alone:
        dist.broadcast_object_list(box, src=0)
    run_dir = Path(config.run.output_dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    loop = finray_api.assembled(config, box[0], run_dir)
    turns = measuring.Turns(job.turns, config.train.max_steps or 0) if job.turns else None
    finish = finray_api.on_every_step(loop, lambda: (clock.step_done(), turns and turns.pass_on()))
    clock.begin()
    if turns:
        turns.wait()
    loop.run()
    finish()
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported in a run that is to be without it")
    model: Any = loop.task.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: dict[str, Any] = {
        "trainable_parameters": sum(parameter.numel() for parameter in parameters),
        "settings": {
            "attention": model.config._attn_implementation,
            "base_dtype": str(model.get_input_embeddings().weight.dtype),
            "adapter_dtype": str(parameters[0].dtype),
            "threads": torch.get_num_threads(),
        },
        "seconds_in_turn": sum(turns.seconds[job.warmup : -1]) if turns else None,
    }
    if not alone:
        dist.barrier()  # Records are read, and products timed, only after all ranks are done.
    if job.gemm:
        import flops

        timed = records_of(run_dir)[job.warmup :]
        micro = len(timed) * (config.train.global_batch_size // config.train.micro_batch_size)
        found["gemm_flops_per_s"] = flops.gemm_rate(
            model.config,
            tokens=sum(record["step_tokens"] for record in timed) // micro,
            targets=sum(record["supervised"] for record in timed) // micro,
            dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
            device=torch.device("cpu"),
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return found


def records_of(run_dir: Path) -> list[Record]:
    """The training records of a run, with the tokens of each step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    before = 0
    for record in records:
        record["step_tokens"] = record["tokens"] - before
        before = record["tokens"]
    return records


def marks_of(run_dir: Path) -> list[float]:
    """When each step's record was written, according to the TensorBoard events."""
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.wall_time for event in events.Scalars("train/loss")]


def main() -> None:
    job: FinrayJob = measuring.job(FinrayJob)
    clock = measuring.Clock()
    run_dir = Path(job.config["run"]["output_dir"]) / job.config["run"]["name"]
    found: dict[str, Any] = {"trainable_parameters": 0}
    if job.through_ray:
        import finray_api

        import finray

        config = finray_api.build_config(job.config, source="benchmark")
        handle = lambda record: clock.step_done() if finray_api.is_step(record) else None  # noqa: E731
        summary: Any = finray.train(config, quiet=True, observers=handle).summary
        summary = summary if isinstance(summary, dict) else summary.json()
        clock.peak_rss_bytes, clock.cpu_marks = int(summary["peak_memory_bytes"][0]), []
        found |= {"phases": summary["phases"]}
    else:
        found |= run_here(job, clock)
    records = records_of(run_dir)
    tokens = [record["step_tokens"] for record in records]
    result = measuring.trained(
        clock,
        found.pop("settings", {}),
        rows=[record.get("samples", []) for record in records],
        own_tokens=tokens,
        padded_tokens=tokens,
        targets=[record["supervised"] for record in records],
        losses=[record["loss"] for record in records],
        norms=[record["grad_norm"] for record in records],
        trainable_parameters=found.pop("trainable_parameters"),
    )
    marks = marks_of(run_dir) if (run_dir / "tensorboard").is_dir() else clock.marks
    result |= {"marks": marks, "step_seconds": [record["seconds"] for record in records]}
    measuring.emit(result | found, "finray", "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
