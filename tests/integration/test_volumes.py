"""The formulas of what workers exchange, against bytes counted while two of them train over gloo."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.volumes import exchanges
from torch.utils._python_dispatch import TorchDispatchMode

from finray.config.resolved import PreparedRun
from finray.config.schema import AdapterConfig
from finray.data.dataset.prepare import prepare_here
from finray.planning.blueprint import draw_blueprint
from finray.planning.estimate import Setup
from tests.support import processes, runs, tiny

pytestmark = pytest.mark.nightly

# A wide head beside two layers would hide what layers do.
SHAPE = {"num_hidden_layers": 4}
MICRO_BATCHES = 2
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({"strategy": "ddp"}, {"strategy": "ddp"}),
    "fsdp": ({"strategy": "fsdp"}, {"strategy": "fsdp"}),
    "fsdp-kept": ({"strategy": "fsdp", "reshard_after_forward": False}, {"strategy": "fsdp", "reshard": False}),
    "hybrid": ({"strategy": "fsdp", "shard_size": 1}, {"strategy": "fsdp", "shards": 1}),
    **{
        f"zero{stage}": ({"strategy": "deepspeed", "zero_stage": stage}, {"strategy": f"zero{stage}"})
        for stage in (1, 2, 3)
    },
}


ZERO3 = {
    "stage": 3,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}


# Name of the operation to kind, and which argument holds the whole tensors.
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
}


class Traffic(TorchDispatchMode):
    """Bytes by kind of collective; sums of a few numbers in fp64 and of integers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, place = _OPERATIONS.get(func._schema.name.split("::")[1], (func._schema.name, 0))
            self.bytes[kind] += sum(_size(tensor) for tensor in _tensors(args[place]))
        return func(*args, **(kwargs or {}))


def _size(tensor: torch.Tensor) -> int:
    counted = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.numel() > 16
    return tensor.numel() * tensor.element_size() if counted else 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def plain_of(model: Path, folder: Path, case: str, method: str) -> dict[str, Any]:
    parallel = dict(CASES[case][0])
    if case == "zero3":
        parallel |= {"deepspeed_config": str(folder / "zero3.json")}
    changes = {"adapter.method": method, "train.max_steps": 2, "train.global_batch_size": 2 * MICRO_BATCHES}
    return runs.tiny_run(model, folder / "rows.jsonl", folder / f"{case}-{method}", changes | {"parallel": parallel})


def _member(rank: int, meeting: str, jobs: list[tuple[str, dict[str, Any], str]], out: str) -> None:
    from finray.parallel import make_strategy
    from finray.training.assemble import assemble

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
    found = {}
    for name, plain, prepared in jobs:
        config = runs.config_of(plain)
        run_dir = Path(config.run.output_dir) / "run"
        run_dir.mkdir(parents=True, exist_ok=True)
        resolved = runs.resolved_of(config, world_size=2)
        strategy = make_strategy(config, resolved, torch.device("cpu"))
        run = PreparedRun(prepared, resolved)
        loop = assemble(config, resolved, prepared=run, run_dir=run_dir, strategy=strategy).loop
        # The first step proves the head and fills buffers; the second is like all that come.
        steps: list[dict[str, int]] = []
        with Traffic() as traffic:

            def after(*_: Any, traffic: Traffic = traffic, steps: list[dict[str, int]] = steps, **more: Any) -> None:
                steps.append(dict(traffic.bytes))
                traffic.bytes.clear()

            loop._after_step = after  # type: ignore[method-assign]
            loop.run()
        found[name] = steps[-1]
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, dict[str, int]]:
    """Bytes by kind in the second step of each case."""
    folder = tmp_path_factory.mktemp("volumes")
    tiny.write_chat_rows(folder, 24)
    tiny.save_model("llama", folder / "model", tokenizer, **SHAPE)
    jobs = []
    for case in CASES:
        for method in ("lora", "none"):
            plain = plain_of(folder / "model", folder, case, method)
            jobs.append((f"{case}-{method}", plain, prepare_here(runs.config_of(plain))))
    # A model this small would be gathered once and kept.
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": ZERO3}), encoding="utf-8")
    processes.start(_member, (str(folder / "group"), jobs, str(folder / "out.json")), processes=2)
    found: dict[str, dict[str, int]] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("method", ["lora", "none"])
@pytest.mark.parametrize("case", list(CASES))
def test_workers_exchange_what_the_formulas_say(counted: dict[str, dict[str, int]], case: str, method: str) -> None:
    blueprint = draw_blueprint(tiny.build_model("llama", **SHAPE), AdapterConfig(method=method, rank=4))
    expected = exchanges(blueprint, Setup(workers=2, **CASES[case][1]), micro_batches=MICRO_BATCHES)
    assert expected
    found = {kind: size for kind, size in counted[f"{case}-{method}"].items() if size}
    assert found == pytest.approx({one.kind: one.size for one in expected}, rel=0.02)
