"""What runs in every Ray Train worker: find the place in the group, build the loop, run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from finray.config.load import build_config
from finray.errors import CheckpointError, FinrayError, TrainingError


def train_worker(payload: dict[str, Any]) -> dict[str, Any]:
    """Train; the value of rank 0 is the run's summary, or its failure.

    A failure that another attempt would meet again is returned and not raised, because Ray restarts what raises.

    Args:
        payload: ``config`` (plain), ``prepared``, ``run_dir``, ``threads``, ``mailbox``.
    """
    import ray.train
    import ray.train.torch
    import torch

    from finray.parallel.ddp import DataParallel
    from finray.training.assemble import assemble, summary

    torch.set_num_threads(int(payload["threads"]))
    device = ray.train.torch.get_device()
    strategy = DataParallel(device)
    mailbox = payload["mailbox"]

    def notify(record: dict[str, Any]) -> None:
        mailbox.put.remote(record)

    try:
        assembled = assemble(
            build_config(payload["config"], source="driver"),
            prepared=Path(payload["prepared"]),
            run_dir=Path(payload["run_dir"]),
            strategy=strategy,
            notify=notify,
            reported=_report,
        )
    except FinrayError as error:
        return {"failure": error.to_dict()}
    _record_processes(Path(payload["run_dir"]), strategy)
    try:
        assembled.loop.run()
    except (TrainingError, CheckpointError) as error:
        # Both are raised on every rank alike, as are those of assemble; see training.step and training.loop.
        return {"failure": error.to_dict()}
    finally:
        for tracker in assembled.loop.trackers:
            tracker.close()
    return {"summary": summary(assembled), "header": assembled.header}


def _report(path: Path, metrics: dict[str, float]) -> None:
    """Tell Ray Train about a checkpoint that is already where it belongs."""
    import ray.train
    from ray.train import CheckpointUploadMode

    first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(str(path)) if first else None,
        checkpoint_dir_name=path.name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def _record_processes(run_dir: Path, strategy: Any) -> None:
    """Write who the workers are: host and process id by rank, for whoever has to look into or end one."""
    import json
    import socket

    processes = strategy.gather({"rank": strategy.rank, "host": socket.gethostname(), "pid": os.getpid()})
    if strategy.rank == 0:
        (run_dir / "workers.json").write_text(json.dumps(processes, indent=2) + "\n", encoding="utf-8")
