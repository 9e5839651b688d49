"""What runs in every Ray Train worker: find the place in the group, build the loop, run it."""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from finray.config.load import build_config
from finray.errors import CheckpointError, FinrayError, TrainingError
from finray.runtime import failures as attempts


def train_worker(payload: dict[str, Any]) -> dict[str, Any]:
    """Train; the value of rank 0 is the run's summary, or its failure.

    A failure that another attempt would meet again is returned and not raised, because Ray restarts what raises.

    Args:
        payload: ``config`` (plain), ``prepared``, ``run_dir``, ``threads``, ``mailbox``.
    """
    import ray.train.torch
    import torch

    from finray.parallel.base import on_all_ranks
    from finray.training.allocator import keep_freed_memory
    from finray.training.assemble import assemble, summary
    from finray.training.strategies import strategy_of

    torch.set_num_threads(int(payload["threads"]))
    config = build_config(payload["config"], source="driver")
    keep_freed_memory(but_large=config.parallel.strategy != "ddp")
    strategy = strategy_of(config, ray.train.torch.get_device())
    run_dir = Path(payload["run_dir"])
    attempt = strategy.broadcast_object(uuid.uuid4().hex)
    mailbox = payload["mailbox"]

    def notify(record: dict[str, Any]) -> None:
        mailbox.put.remote(record)

    step = attempts.LOADING
    try:
        on_all_ranks(strategy, lambda: attempts.check(run_dir, attempts.LOADING))
        assembled = assemble(
            config,
            prepared=str(payload["prepared"]),
            run_dir=run_dir,
            strategy=strategy,
            notify=notify,
            reported=_report,
        )
        step = assembled.loop.state.step
        on_all_ranks(strategy, lambda: attempts.check(run_dir, step))
        _record_processes(run_dir, strategy)
        try:
            assembled.loop.run()
        finally:
            for tracker in assembled.loop.trackers:
                tracker.close()
        return {"summary": summary(assembled)}
    except FinrayError as error:
        if step != attempts.LOADING and not isinstance(error, TrainingError | CheckpointError):
            attempts.record(run_dir, attempts.Failure(attempt, step, attempts.describe(error)))
            raise
        # Raised on every rank alike; see training.assemble, training.step and training.loop.
        return {"failure": error.to_dict()}
    except Exception as error:
        attempts.record(run_dir, attempts.Failure(attempt, step, attempts.describe(error)))
        raise


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
    processes = strategy.all_gather_object({"rank": strategy.rank, "host": socket.gethostname(), "pid": os.getpid()})
    if strategy.rank == 0:
        (run_dir / "workers.json").write_text(json.dumps(processes, indent=2) + "\n", encoding="utf-8")
