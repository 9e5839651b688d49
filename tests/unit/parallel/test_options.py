"""What of the parallel section reaches the library that does the work; the curves of strategies are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finray.config.resolved import Resolved
from finray.config.schema import ParallelConfig
from finray.parallel import make_strategy
from finray.parallel.ddp import DDPStrategy
from finray.parallel.deepspeed import config as deepspeed_config
from finray.parallel.fsdp import FSDPStrategy, _own_table
from tests.support import runs

PLAIN: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "rows.jsonl"}, "train": {"global_batch_size": 8}}
CPU = torch.device("cpu")


@pytest.fixture
def four() -> Iterator[None]:
    """This process as one of four; what the others would send is whatever is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(precision: str = "fp32", **fields: Any) -> Net:
    net = Net()
    FSDPStrategy(CPU, ParallelConfig(strategy="fsdp", **fields), precision=precision).shard(net, list(net.blocks))
    return net


@pytest.mark.parametrize(
    ("size", "placements", "rows"),
    [(None, (Shard(0),), 2), (4, (Shard(0),), 2), (2, (Replicate(), Shard(0)), 4), (1, (Replicate(), Shard(0)), 8)],
)
def test_so_many_workers_share_a_weight(four: None, size: int | None, placements: Any, rows: int) -> None:
    for parameter in sharded(shard_size=size).parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == placements
        assert parameter.to_local().shape[0] == rows


@pytest.mark.parametrize("freed", [True, False])
def test_gathered_weights_are_freed_after_the_forward_pass_where_that_is_asked_for(four: None, freed: bool) -> None:
    net = sharded(reshard_after_forward=freed)
    net(torch.ones(1, 8))
    assert {isinstance(one, DTensor) for one in net.blocks.parameters()} == {freed}
    # The rest is needed at once for the backward pass.
    assert not isinstance(net.head.weight, DTensor)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_strategy_is_the_resolved_one(four: None, name: str) -> None:
    config = runs.config_of({**PLAIN, "parallel": {"strategy": "fsdp", "shard_size": 2}})
    made = make_strategy(config, SimpleNamespace(strategy=name, precision="bf16"), CPU)  # type: ignore[arg-type]
    assert type(made) is {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[name]
    assert (made.rank, made.world_size, made.shards_weights) == (0, 4, name == "fsdp")


@pytest.mark.parametrize("most", [0.01, 1e3, None])
def test_ddp_clips_to_the_norm_that_is_asked_for(most: float | None) -> None:
    parameters = list(Net().parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    before = (4.0 * sum(one.numel() for one in parameters)) ** 0.5
    norm = DDPStrategy(CPU).clip_grad_norm(parameters, most)
    assert float(norm) == pytest.approx(before)
    after = sum(float(one.grad.square().sum()) for one in parameters if one.grad is not None) ** 0.5
    # A smaller norm stays what it is.
    assert after == pytest.approx(before if most is None else min(before, most), rel=1e-4)


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        (1, False, {}),
        (1, True, {"offload_optimizer": {"device": "cpu"}}),
        (2, True, {"offload_optimizer": {"device": "cpu"}}),
        (3, True, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (3, False, {}),
    ],
)
def test_deepspeed_is_told_of_stage_offload_and_steps(stage: int, offload: bool, expected: dict[str, Any]) -> None:
    parallel = {"strategy": "deepspeed", "zero_stage": stage, "cpu_offload": offload}
    train = {"max_grad_norm": 0.3, "micro_batch_size": 3, "global_batch_size": 20}
    config = runs.config_of({**PLAIN, "parallel": parallel, "train": train})
    resolved = Resolved("bf16", None, None, True, "deepspeed", False, global_batch_size=20)
    settings = deepspeed_config.filled(config, resolved, workers=2, width=10)
    zero = settings["zero_optimization"]
    assert zero["stage"] == stage
    assert {name: one for name, one in zero.items() if name.startswith("offload")} == expected
    assert settings["gradient_clipping"] == 0.3
    # Seven micro-batches, of which a worker has four.
    assert (settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]) == (3, 4)
    assert (settings["bf16"]["enabled"], settings["fp16"]["enabled"]) == (True, False)
    plain = runs.config_of({**PLAIN, "parallel": parallel, "train": {"global_batch_size": 8, "max_grad_norm": None}})
    assert deepspeed_config.filled(plain, resolved, workers=2, width=10)["gradient_clipping"] == 0.0


class Tables(torch.nn.Module):
    """Embeddings in a block and outside of it, and a head."""

    def __init__(self, outside: tuple[int, ...], inside: int, head: int) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Embedding(inside, 4))
        self.outside = torch.nn.ModuleList(torch.nn.Embedding(rows, 4) for rows in outside)
        self.head = torch.nn.Linear(4, head, bias=False)


@pytest.mark.parametrize(("outside", "place"), [((5, 9, 7), 1), ((9, 5), 0), ((6,), 0), ((), None)])
def test_the_largest_table_outside_of_the_blocks_is_shared_alone(outside: tuple[int, ...], place: int | None) -> None:
    model = Tables(outside, 50, 60)
    assert _own_table(model, [model.block]) is (None if place is None else model.outside[place])


def test_a_table_that_is_frozen_or_tied_is_not_shared_alone() -> None:
    model = Tables((5, 9), 50, 9)
    model.outside[1].weight.requires_grad_(False)
    assert _own_table(model, [model.block]) is None
    model.outside[1].weight.requires_grad_(True)
    model.head.weight = model.outside[1].weight
    assert _own_table(model, [model.block]) is None
    model.head.weight = model.outside[0].weight
    assert _own_table(model, [model.block]) is model.outside[1]
    assert _own_table(model, [model.block, *model.outside]) is None


def test_the_table_is_gathered_in_its_own_group_and_the_rest_in_others(four: None) -> None:
    model = Tables((6, 9), 50, 60)
    FSDPStrategy(CPU, ParallelConfig(strategy="fsdp"), precision="fp32").shard(model, [model.block])
    groups = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert groups == ["", "block", "outside.1"]
    model.outside[1](torch.tensor([1]))
    # The head needs it again, if only for its gradient.
    assert not isinstance(model.outside[1].weight, DTensor)
