"""Data parallelism: gradients lie in the buckets that are summed, some of them while the backward pass still runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from finray.parallel import ddp
from finray.parallel.ddp import DDPStrategy
from tests.support import processes

WORKERS, STEPS = 3, 2
# Micro-batches of each rank: one has none at all.
BATCHES = (2, 1, 0)


class Net(torch.nn.Module):
    """Small and large parameters of two dtypes; ``unused`` gets no gradient, ``rare`` only in rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 11)
        self.table = torch.nn.Parameter(torch.randn(40, 11))
        self.rare = torch.nn.Linear(11, 11)
        self.unused = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(11, 5)
        self.wide = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, *, rare: bool) -> torch.Tensor:
        y = torch.tanh(self.first(x)) @ self.table.T @ self.table
        y = self.second(self.rare(y) if rare else y)
        return cast(torch.Tensor, (y.double() * self.wide).pow(2).mean())


def inputs(step: int, rank: int, number: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def losses(net: torch.nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    return [net(inputs(step, rank, number), rare=rank == 0) for number in range(BATCHES[rank])]


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes of memory behind some tensors."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def steps(strategy: DDPStrategy, seen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Gradients of every step. ``seen`` gets a record for each sum over the ranks."""
    net = Net()
    parameters = dict(net.named_parameters())
    wanted = sum(one.nbytes for one in parameters.values())
    state = {"backward": False}
    real = dist.all_reduce

    def spy(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        gradients = [one.grad for one in parameters.values() if one.grad is not None]
        held = storages([*gradients] if tensor.dtype == torch.float64 and tensor.numel() == 1 else [tensor, *gradients])
        seen.append({"in backward": state["backward"], "held": held, "wanted": wanted})
        return real(tensor, *arguments, **options)

    found = {}
    called, _ = strategy.prepare(net, cast(Any, SimpleNamespace(parameters=parameters)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spy)
        for step in range(STEPS):
            for number, loss in enumerate(losses(called, step, strategy.rank)):
                state["backward"] = True
                strategy.backward(loss, last=number == BATCHES[strategy.rank] - 1)
                state["backward"] = False
            extra = torch.tensor([float(strategy.rank)], dtype=torch.float64)
            assert strategy.all_reduce_gradients(list(parameters.values()), extra).item() == sum(range(WORKERS))
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                found[f"{step}/{name}"] = parameter.grad.clone()
                parameter.grad = None
    return found


def _member(rank: int, world_size: int, meeting: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)
    # Several buckets, one of them a parameter that is larger than a bucket.
    ddp.BUCKET_ELEMENTS = 200
    for name in ("first", "again"):
        seen: list[dict[str, Any]] = []
        save_file(steps(DDPStrategy(torch.device("cpu")), seen), folder / f"{name}-{rank}.safetensors")
        large = [one for one in seen if one["held"] > one["wanted"]]
        assert not large, f"gradients have a second copy: {large[0]}"
        overlapped = sum(one["in backward"] for one in seen)
        assert (overlapped > 0) == (BATCHES[rank] > 0), f"{overlapped} of {len(seen)} sums began in a backward pass"
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three processes found, twice."""
    folder = tmp_path_factory.mktemp("ddp")
    processes.start(_member, (WORKERS, str(folder / "group"), folder), processes=WORKERS)
    return folder


def test_gradients_are_the_sum_of_all_micro_batches_however_many_a_rank_has(folder: Path) -> None:
    expected = {}
    for step in range(STEPS):
        net = Net()
        for rank in range(WORKERS):
            for loss in losses(net, step, rank):
                loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in net.named_parameters():
            expected[f"{step}/{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for rank in range(WORKERS):
        found = load_file(folder / f"first-{rank}.safetensors")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_all_ranks_and_a_restart_have_the_same_bits(folder: Path) -> None:
    first = load_file(folder / "first-0.safetensors")
    for name in ("first-1", "first-2", "again-0", "again-1", "again-2"):
        found = load_file(folder / f"{name}.safetensors")
        assert all(torch.equal(found[key], value) for key, value in first.items()), name
