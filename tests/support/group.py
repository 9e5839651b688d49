"""Runs in several processes of a torch.distributed group over gloo, without Ray."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import processes


def run_group(plain: dict[str, Any], run_dir: Path, *, world_size: int, stop_after: int | None = None) -> None:
    """Run (or continue) a training with the strategy of its config; `stop_after` ends it as a kill would."""
    run_all([(plain, run_dir)], world_size=world_size, stop_after=stop_after)


def run_all(
    runs: list[tuple[dict[str, Any], Path]],
    *,
    world_size: int,
    stop_after: int | None = None,
    look: Callable[[Any, Path], None] | None = None,
) -> None:
    """Several trainings, one after the other in one group of processes: their start takes longer than they do.

    `look` is called in every process with what was assembled and the run directory, before a training.
    """
    from finray.data.dataset.prepare import prepare_here
    from tests.support.runs import config_of

    jobs = []
    for plain, run_dir in runs:
        run_dir.mkdir(parents=True, exist_ok=True)
        jobs.append((plain, prepare_here(config_of(plain)), str(run_dir)))
    with tempfile.TemporaryDirectory() as folder:
        # A file to meet at: a port that is free now may be taken a moment later.
        processes.start(_member, (world_size, f"{folder}/group", jobs, stop_after, look), processes=world_size)


class Killed(Exception):
    """Stands for the end of a process."""


def _member(
    rank: int,
    world_size: int,
    meeting: str,
    jobs: list[tuple[Any, str, str]],
    stop_after: int | None,
    look: Callable[[Any, Path], None] | None,
) -> None:
    from finray.parallel import make_strategy
    from finray.records import TrainRecord
    from finray.training.assemble import assemble
    from tests.support.runs import config_of, resolved_of

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)
    device = torch.device("cpu")

    def notify(record: Any) -> None:
        if stop_after is not None and isinstance(record, TrainRecord) and record.step > stop_after:
            raise Killed

    try:
        for plain, prepared, run_dir in jobs:
            config = config_of(plain)
            resolved = resolved_of(config, world_size=world_size)
            assembled = assemble(
                config,
                resolved,
                prepared=prepared,
                run_dir=Path(run_dir),
                strategy=make_strategy(config, resolved, device),
                notify=notify,
            )
            if look is not None:
                look(assembled, Path(run_dir))
            assembled.loop.run()
            assembled.loop.trackers.finish()
        # gloo does not like peers that leave early.
        dist.barrier()
    except Killed:
        os._exit(0)
    finally:
        dist.destroy_process_group()
