"""The driver's CPU time, by number of workers: workers without torch send the driver and Ray the messages of finray's.

    python driver_cost.py '{"workers": [2, 8, 32], "steps": 200, "step_s": 0.05}'

Three parts with the same number of steps: only steps; an evaluation in every step; a checkpoint reported to Ray in
every fourth step. Workers sleep during a step, so that the cores are free for the driver.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

PARTS = ("steps", "evaluations", "checkpoints")
REPORT_EVERY = 4
HANG_S = 300.0
WARM_S = 5.0


def work(payload: dict[str, Any]) -> None:
    """A worker of Ray Train."""
    import ray
    import ray.train
    import ray.train.collective

    from finray.runtime.worker import Reports, _report

    context, reports = ray.train.get_context(), Reports(_report)
    rank, count = context.get_world_rank(), context.get_world_size()
    # All begin at the same time, however long their processes took to start.
    ray.train.collective.barrier()
    speak(rank, count, payload, lambda path, step: reports.put(path, {"step": float(step)}))
    reports.close(60.0)


def speak(rank: int, count: int, payload: dict[str, Any], report: Callable[[Path, int], None]) -> None:
    """Send the messages that a rank sends while it trains."""
    from finray.records import EvalRecord, Note, TrainRecord
    from finray.runtime.progress import Sender
    from finray.runtime.worker import beat
    from finray.training.pulse import Pulse

    sender, pulse = Sender(payload["listener"]), Pulse()
    beat(sender, "a", rank, pulse, hang_s=HANG_S, world_size=count)
    record = {one.name: 1 for one in fields(TrainRecord)}
    folder = Path(payload["folder"])
    # The first heartbeats belong to the start.
    time.sleep(WARM_S)
    step = 0
    for part in PARTS:
        if rank == 0:
            sender.put(Note(part))
        for _ in range(payload["steps"]):
            step += 1
            pulse.begins(step)
            time.sleep(payload["step_s"])
            pulse.waits()
            pulse.ends()
            if rank == 0:
                sender.put(TrainRecord(**{**record, "step": step, "samples": None}))
            if rank == 0 and part == "evaluations":
                sender.put(EvalRecord(step, {"eval_loss": 0.1}, 2, 0.5))
            if part == "checkpoints" and step % REPORT_EVERY == 0:
                path = folder / f"checkpoint-{step:06d}"
                path.mkdir(exist_ok=True)
                report(path, step)
    if rank == 0:
        sender.put(Note("end"))
    sender.close()


def fit(count: int, payload: dict[str, Any], look: Callable[[], None]) -> None:
    """Run the workers under Ray Train."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from finray.runtime.trainer import Trainer

    Trainer(
        work,
        alone=True,
        group="bench",
        watch=look,
        listener=payload["listener"],
        expected=count,
        evaluator=False,
        train_loop_config=payload,
        scaling_config=ScalingConfig(num_workers=count, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="bench", storage_path=payload["folder"], failure_config=FailureConfig(max_failures=0)
        ),
    ).fit()


def measured(ray: Any, count: int, steps: int, step_s: float) -> dict[str, Any]:
    """The driver's CPU seconds and number of messages, for each part."""
    import psutil

    from finray.planning.placement import Placement
    from finray.records import Note
    from finray.runtime.progress import Listener
    from finray.runtime.signals import Pending
    from finray.runtime.watch import Watch

    marks: list[tuple[str, float, float, int]] = []
    heard = [0]
    controllers: list[psutil.Process] = []

    def mark(name: str) -> None:
        if not controllers:
            for one in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "TrainController" in " ".join(one.cmdline()):
                        controllers.append(one)
        spent = sum(sum(one.cpu_times()[:2]) for one in controllers)
        marks.append((name, time.process_time(), spent, heard[0]))

    def handle(record: Any) -> None:
        if isinstance(record, Note) and record.message in (*PARTS, "end"):
            mark(record.message)

    watch = Watch(
        ray, "bench", Placement(count, 1, use_gpu=False), Pending(), handle,
        grace_s=60.0, head=lambda: True, head_patience_s=60.0, hang_s=HANG_S,
    )  # fmt: skip

    def hear(record: Any) -> None:
        heard[0] += 1
        watch.heard(record)

    listener = Listener("127.0.0.1", hear, watch.resize, lambda: watch.began_at)
    watch.listener = listener
    with tempfile.TemporaryDirectory() as folder, listener:
        payload = {"listener": listener.address, "folder": folder, "steps": steps, "step_s": step_s}
        fit(count, payload, watch.look)
    found: dict[str, Any] = {"workers": count}
    for before, after in itertools.pairwise(marks):
        found[before[0]] = {
            "driver_ms": 1000 * (after[1] - before[1]) / steps,
            "controller_ms": 1000 * (after[2] - before[2]) / steps,
            "messages": (after[3] - before[3]) / steps,
        }
    return found


def main() -> None:
    """Measure each number of workers in one Ray."""
    job = json.loads(sys.argv[1])
    from finray.runtime.cluster import LOCAL_RAY

    os.environ.update(
        {**LOCAL_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25"}
    )
    import ray

    options = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    ray.init(address="local", num_cpus=max(job["workers"]) + 1, object_store_memory=100_000_000, **options)
    results = []
    for count in job["workers"]:
        results.append(measured(ray, count, job["steps"], job["step_s"]))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    ray.shutdown()
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
