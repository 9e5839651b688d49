"""At a start each rank hashes only its share of a checkpoint, and damage in any share is known to all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finray import files
from finray.checkpoint import CheckpointStore, manifest
from finray.errors import CheckpointError
from finray.parallel.ddp import DDPStrategy
from finray.training.checkpointing import find_latest
from tests.support import processes

WORKERS = 3
FILES = [f"part-{number}.safetensors" for number in range(7)]


def fill(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 100)


def write(run_dir: Path, *steps: int) -> None:
    store = CheckpointStore(run_dir)
    for step in steps:
        scratch = store.begin(step)
        store.commit(scratch, step, store.fill(scratch, step, fill), metrics={})


def _look(run_dir: Path, strategy: DDPStrategy) -> dict[str, Any]:
    """What this rank hashed, found, and was told; and whether its own share of the newest checkpoint is whole."""
    store = CheckpointStore(run_dir)
    hashed: list[str] = []
    warnings: list[str] = []
    newest = store.path_of(store.steps()[-1])
    share = manifest.read(newest)["files"][strategy.rank :: strategy.world_size]
    try:
        manifest.verify_files(newest, share)
        own = "whole"
    except CheckpointError as error:
        own = str(error)
    real = files.digest_of

    def spy(path: Path) -> str:
        hashed.append(f"{path.parent.name}/{path.name}")
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "digest_of", spy)
        try:
            found = find_latest(store, strategy, warnings.append, steps=store.steps())
            result = f"step {found.step}" if found is not None else "nothing"
        except CheckpointError as error:
            result = str(error)
    return {"hashed": hashed, "result": result, "warnings": warnings, "own": own}


def _member(rank: int, world_size: int, meeting: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)
    strategy = DDPStrategy(torch.device("cpu"))
    for run_dir in sorted(path for path in folder.iterdir() if path.is_dir()):
        seen = _look(run_dir, strategy)
        dist.barrier()
        (run_dir / f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks see of whole and of damaged checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "whole", 10, 20)
    for number, name in enumerate(FILES[:WORKERS]):
        for kind, steps in (("one", [20]), ("two", [10, 20])):
            run_dir = folder / f"{kind}-{number}"
            write(run_dir, *steps)
            path = run_dir / "checkpoint-000020" / name
            path.write_bytes(path.read_bytes()[:-1] + b"!")
    processes.start(_member, (WORKERS, str(folder / "group"), folder), processes=WORKERS)
    return folder


def seen(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((run_dir / f"seen-{rank}.json").read_text()) for rank in range(WORKERS)]


def test_each_rank_hashes_its_share_and_together_they_hash_every_file_once(folder: Path) -> None:
    ranks = seen(folder / "whole")
    assert [one["result"] for one in ranks] == ["step 20"] * WORKERS
    for rank, one in enumerate(ranks):
        assert one["hashed"] == [f"checkpoint-000020/{name}" for name in FILES[rank::WORKERS]]
    assert sorted(path for one in ranks for path in one["hashed"]) == [f"checkpoint-000020/{name}" for name in FILES]


@pytest.mark.parametrize("owner", range(WORKERS))
def test_damage_in_one_ranks_share_is_refused_and_named_by_all_ranks(folder: Path, owner: int) -> None:
    name = f"checkpoint-000020/{FILES[owner]}"
    for one in seen(folder / f"one-{owner}"):
        assert "all checkpoints of the run are damaged" in one["result"]
        assert name in one["result"]
    ranks = seen(folder / f"two-{owner}")
    assert [one["result"] for one in ranks] == ["step 10"] * WORKERS
    # Rank 0 says so, once, whoever found it.
    assert [len(one["warnings"]) for one in ranks] == [1, 0, 0]
    assert name in ranks[0]["warnings"][0]
    # Control: only one rank can see it in its own share, so the others know it from that one.
    assert [one["own"] == "whole" for one in ranks] == [rank != owner for rank in range(WORKERS)]
