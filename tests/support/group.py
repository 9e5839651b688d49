"""Runs in several processes of a torch.distributed group, without Ray."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finray.training.memory import MemoryPart
from tests.support import processes


class KeptInFiles:
    """Keeps the parts of checkpoints "in memory" in files, which all processes of a group see.

    Args:
        run_dir: of the run; the files lie beside it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir.with_name(f"{run_dir.name}-memory")

    def folder_of(self, part: MemoryPart) -> Path:
        """Where the files of a part are."""
        return self._root / f"{part.attempt}-{part.step}-{part.rank}"

    def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
        """Keep a part, and name it last."""
        for name, content in files.items():
            path = self.folder_of(part) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.folder_of(part).with_suffix(".json").write_text(json.dumps(asdict(part)))

    def parts(self) -> list[MemoryPart]:
        """All that were kept."""
        return [MemoryPart(**json.loads(one.read_text())) for one in sorted(self._root.glob("*.json"))]

    def get(self, part: MemoryPart) -> dict[str, bytes]:
        """The files of a part."""
        folder = self.folder_of(part)
        files = (one for one in folder.rglob("*") if one.is_file())
        return {one.relative_to(folder).as_posix(): one.read_bytes() for one in files}


def warnings_of(run_dir: Path) -> list[str]:
    """What was warned of in all starts of a run."""
    file = run_dir.with_name(f"{run_dir.name}-warnings")
    return file.read_text().splitlines() if file.exists() else []


def run_group(
    plain: dict[str, Any],
    run_dir: Path,
    *,
    world_size: int,
    stop_after: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Run (or continue) a training with the strategy of its config; `stop_after` ends it as a kill would."""
    run_all([(plain, run_dir)], world_size=world_size, stop_after=stop_after, device=device)


def run_all(
    runs: list[tuple[dict[str, Any], Path]],
    *,
    world_size: int,
    stop_after: int | None = None,
    look: Callable[[Any, Path], None] | None = None,
    in_memory: bool = False,
    device: torch.device | None = None,
) -> None:
    """Several trainings, one after the other in one group of processes: their start takes longer than they do.

    `look` is called in every process with what was assembled and the run directory, before a training. With
    `in_memory`, checkpoints are kept by :class:`KeptInFiles`, too. All processes share the device.
    """
    from finray.data.dataset.prepare import prepare_here
    from tests.support.runs import DEVICE, config_of

    jobs = []
    for plain, run_dir in runs:
        run_dir.mkdir(parents=True, exist_ok=True)
        jobs.append((plain, prepare_here(config_of(plain)), str(run_dir)))
    # The process that they are forked from may have been started before there was a server.
    s3 = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with tempfile.TemporaryDirectory() as folder:
        # A file to meet at: a port that is free now may be taken a moment later.
        device = device or DEVICE
        given = world_size, f"{folder}/group", jobs, stop_after, look, in_memory, s3, device
        processes.start(_member, given, processes=world_size, device=device.type)


class Killed(Exception):
    """Stands for the end of a process."""


def _member(
    rank: int,
    world_size: int,
    meeting: str,
    jobs: list[tuple[Any, str, str]],
    stop_after: int | None,
    look: Callable[[Any, Path], None] | None,
    in_memory: bool,
    env: dict[str, str],
    device: torch.device,
) -> None:
    from finray.config.resolved import PreparedRun
    from finray.parallel import make_strategy
    from finray.parallel.base import backend_of
    from finray.records import Note, TrainRecord
    from finray.training.assemble import assemble
    from tests.support.runs import config_of, resolved_of

    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR=device.type)
    torch.set_num_threads(1)
    backend = backend_of(device, shared_gpu=world_size > 1)
    dist.init_process_group(backend, store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)

    def notify(record: Any) -> None:
        if stop_after is not None and isinstance(record, TrainRecord) and record.step > stop_after:
            raise Killed
        if isinstance(record, Note) and record.level == "warning":
            with Path(f"{run_dir}-warnings").open("a") as stream:
                stream.write(f"{record.message}\n")

    try:
        for plain, prepared, run_dir in jobs:
            config = config_of(plain)
            resolved = resolved_of(config, world_size=world_size, device=device)
            assembled = assemble(
                config,
                resolved,
                prepared=PreparedRun(prepared, resolved),
                run_dir=Path(run_dir),
                strategy=make_strategy(config, resolved, device),
                notify=notify,
                memory=KeptInFiles(Path(run_dir)) if in_memory else None,
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
