"""Every optimizer on weights that two ranks share does what it does on whole ones, and so does its saved state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from finray.checkpoint.pieces import PieceReader, TensorPiece, file_name, write_pieces
from finray.sharding import full_tensor, is_first_replica, is_sharded, local_rows
from finray.training.optim.optimizer import Optimizer
from tests.support import processes
from tests.support.optimizing import ROLES, gradients, new_parameters, train_config

# 8 bits: blocks begin where a rank's rows do, so other elements share a scale. bf16 weights are rounded alike on any
# number of ranks.
TOLERANCE = {"adamw": 1e-6, "muon": 1e-6, "adafactor": 1e-6, "adamw_8bit": 4e-3, "bf16-true": 1e-12}
HALF, STEPS = 3, 6


def run(kind: str, folder: Path, *, mesh: DeviceMesh | None = None, start_from: Path | None = None) -> None:
    """Some updates, with what there is half-way and at the end written down; from half-way on where that is given."""
    rank, ranks = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    folder.mkdir(parents=True, exist_ok=True)
    values = new_parameters(kind)
    if start_from is not None:
        values = {name: load_file(start_from / "half.safetensors")[name] for name in values}
    parameters = {}
    for name, value in values.items():
        own = value.detach().clone()
        parameters[name] = torch.nn.Parameter(own if mesh is None else distribute_tensor(own, mesh, [Shard(0)]))
    optimizer = Optimizer(parameters, train_config(kind), roles=ROLES)
    if start_from is not None and any(start_from.glob("optimizer-*")):
        optimizer.load_sharded_state(PieceReader(start_from, "optimizer", [path.name for path in start_from.iterdir()]))
    for number in range(HALF if start_from else 0, STEPS):
        for name, value in gradients(number, kind).items():
            parameters[name].grad = value if mesh is None else distribute_tensor(value, mesh, [Shard(0)])
        optimizer.step(0.02, found_inf=torch.zeros(()))
        if number == HALF - 1:
            pieces = []
            for name, value in optimizer.sharded_state().items():
                local, start = local_rows(value)
                if is_first_replica(value) and (rank == 0 or is_sharded(value)) and (local.numel() or not start):
                    pieces.append(TensorPiece(name, local, start, tuple(value.shape)))
            write_pieces(folder / file_name("optimizer", rank=rank, world_size=ranks), pieces)
        if number in (HALF - 1, STEPS - 1):
            full = {name: full_tensor(one.detach()) for name, one in parameters.items()}
            if rank == 0:
                save_file(full, folder / ("half.safetensors" if number == HALF - 1 else "end.safetensors"))
    if mesh is not None:
        dist.barrier()


def _member(rank: int, world_size: int, meeting: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    for kind in TOLERANCE:
        run(kind, folder / "two" / kind, mesh=mesh)
        run(kind, folder / "two-again" / kind, mesh=mesh, start_from=folder / "two" / kind)
        run(kind, folder / "one-then-two" / kind, mesh=mesh, start_from=folder / "one" / kind)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for kind in TOLERANCE:
        run(kind, folder / "one" / kind)
    processes.start(_member, (2, str(folder / "group"), folder), processes=2)
    for kind in TOLERANCE:
        run(kind, folder / "two-then-one" / kind, start_from=folder / "two" / kind)
        (folder / "bare" / kind).mkdir(parents=True)
        (folder / "bare" / kind / "half.safetensors").symlink_to(folder / "one" / kind / "half.safetensors")
        run(kind, folder / "forgotten" / kind, start_from=folder / "bare" / kind)
    return folder


def difference(left: Path, right: Path) -> float:
    ours, theirs = load_file(left / "end.safetensors"), load_file(right / "end.safetensors")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("name", ["two", "one-then-two", "two-then-one"])
def test_shards_are_updated_as_the_whole_is_and_state_goes_from_one_to_the_other(
    runs: Path, kind: str, name: str
) -> None:
    assert difference(runs / name / kind, runs / "one" / kind) < TOLERANCE[kind]
    # The comparison sees the state missing.
    assert difference(runs / "forgotten" / kind, runs / "one" / kind) > TOLERANCE[kind]


@pytest.mark.parametrize("kind", list(TOLERANCE))
def test_state_goes_on_to_the_bit_on_as_many_ranks(runs: Path, kind: str) -> None:
    assert difference(runs / "two-again" / kind, runs / "two" / kind) == 0
