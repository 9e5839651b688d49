"""What finray does around DeepSpeed, with what stands for its engine; whole runs are in tests/distributed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finray.config.resolved import Precision, Resolved
from finray.errors import ConfigError
from finray.parallel.deepspeed import config as deepspeed_config
from finray.parallel.deepspeed import strategy as module
from finray.parallel.deepspeed.state import Place, ZeroWeight
from finray.parallel.deepspeed.strategy import DeepSpeedStrategy, _OneByOne
from tests.support import runs

CPU = torch.device("cpu")


def config(**parallel: Any) -> Any:
    plain: dict[str, Any] = {
        "model": {"name": "m"},
        "data": {"source": "rows.jsonl"},
        "train": {"global_batch_size": 8},
    }
    return runs.config_of({**plain, "parallel": {"strategy": "deepspeed", **parallel}})


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "_library", lambda device, **options: asked.append(options))
    return asked


def decided(precision: Precision) -> Resolved:
    return Resolved(precision, None, None, True, "deepspeed", False)


@pytest.mark.parametrize(("stage", "precision"), [(None, "bf16"), (1, "fp16"), (3, "fp32")])
def test_one_process_alone_is_a_group_of_one(
    no_library: list[dict[str, Any]], stage: int | None, precision: Precision
) -> None:
    assert not dist.is_initialized()
    try:
        made = DeepSpeedStrategy(CPU, config(zero_stage=stage), decided(precision))
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        # Another one takes the group that there is.
        DeepSpeedStrategy(CPU, config(zero_stage=stage), decided(precision))
    finally:
        dist.destroy_process_group()
    assert (made.stage, made.shards_weights, made.lockstep) == (stage or 2, stage == 3, True)
    assert no_library == [{"fp16": precision == "fp16"}] * 2


def test_on_a_gpu_one_process_alone_has_the_group_of_gpus(no_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append((backend, options)))
    resolved = decided("fp16")
    made = DeepSpeedStrategy.from_config(config(zero_stage=1), resolved, torch.device("cuda", 1))
    ((backend, options),) = asked
    assert (backend, options["rank"], options["world_size"]) == ("cpu:gloo,cuda:nccl", 0, 1)
    assert isinstance(options["store"], dist.HashStore)  # type: ignore[attr-defined]
    assert (made.device, made._resolved, made.stage, made.world_size) == (torch.device("cuda", 1), resolved, 1, 1)


@pytest.fixture
def strategy(no_library: Any) -> DeepSpeedStrategy:
    made = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    made.device, made.world_size, made.stage = CPU, 4, 2
    made._resolved = decided("bf16")
    return made


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_sizes_that_follow_from_a_model_are_those_of_its_text_model(
    strategy: DeepSpeedStrategy, precision: Precision
) -> None:
    """A PEFT model, and a head, may have a configuration of their own kind."""
    net, strategy._config = torch.nn.Sequential(torch.nn.Module()), config(zero_stage=1)
    strategy._resolved = decided(precision)
    net.config = SimpleNamespace(hidden_size=3)
    net[0].config = SimpleNamespace(hidden_size=5, get_text_config=lambda: SimpleNamespace(hidden_size=12))
    found = strategy._settings(net)
    # Eight rows a step on four workers are two micro-batches of one each.
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (8, 2)
    assert found["zero_optimization"]["reduce_bucket_size"] == 144
    assert found["bf16"]["enabled"] is (precision == "bf16")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_get_memory_one_at_a_time_and_those_that_are_tied_stay_tied(dtype: torch.dtype | None) -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 5, bias=False))
    net[2].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    made = []
    for parameter in _OneByOne(net, CPU, dtype).parameters():
        # Those that were not asked for yet have none.
        made.append(parameter)
        assert sum(not one.is_meta for one in net.parameters()) == len(made)
    assert [tuple(one.shape) for one in made] == [(5, 3), (3, 3), (3,)]
    assert {one.dtype for one in made} == {dtype or torch.float32}
    assert [one.requires_grad for one in made] == [True, True, False]
    assert net[2].weight is net[0].weight is made[0]
    assert net[1].bias is made[2]


@pytest.mark.parametrize("place", [None, Place(torch.zeros(4), 0, 0, 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_small_weights_that_stay_whole_under_stage_3_are_loaded_whole_too(place: Place | None, rank: int) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(7, 1, dtype=torch.bfloat16))
    weight.ds_shape, weight.ds_numel, weight.ds_zero_partition_rank = (7, 1), 7, rank
    weight.ds_tensor = torch.full((4,), 9.0)
    weight.ds_tensor.ds_numel = 4
    whole = torch.arange(1.0, 8.0).reshape(7, 1)
    ZeroWeight(weight, None).load_local(lambda start, stop: whole[start:stop])
    assert weight.data.flatten().tolist() == whole.flatten().tolist()
    assert weight.ds_tensor.tolist() == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 0.0])[rank]
    assert ZeroWeight(weight, place).dtype == (torch.bfloat16 if place is None else torch.float32)


# --- its configuration ------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_or_is_none_is_named(tmp_path: Path) -> None:
    for content, said in ((None, "cannot be read: "), ("{", "is not JSON"), ("[]", "is not a JSON object")):
        path = tmp_path / "ds.json"
        if content is not None:
            path.write_text(content)
        settings = config()
        settings = settings.model_copy(
            update={"parallel": settings.parallel.model_copy(update={"deepspeed_config": str(path)})}
        )
        with pytest.raises(ConfigError, match=said) as caught:
            deepspeed_config.load(settings)
        assert caught.value.where == f"parallel.deepspeed_config={path}"
    assert deepspeed_config.load(config()) == {}


def test_the_json_may_be_in_the_config_itself() -> None:
    given = {"zero_optimization": {"stage": 3}, "train_batch_size": 7}
    settings = config(deepspeed_config=given)
    assert deepspeed_config.load(settings) == given
    with pytest.raises(ConfigError, match="contradicts") as caught:
        deepspeed_config.check(settings)
    assert caught.value.where == "parallel.deepspeed_config"
    assert caught.value.problems[0].startswith("`deepspeed_config: train_batch_size` is 7")


def test_an_auto_that_is_deepspeeds_to_decide_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "sub_group_size": "auto", "reduce_bucket_size": "auto"}}')
    found = deepspeed_config.filled(config(deepspeed_config=str(path)), decided("fp32"), workers=2, width=10)
    # The sizes that the file does not leave to anybody are DeepSpeed's own.
    assert found["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 100}
    default = deepspeed_config.filled(config(zero_stage=3), decided("bf16"), workers=2, width=10)
    assert default["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 90,
        "stage3_param_persistence_threshold": 100,
    }
    assert default["fp16"] == {"enabled": False, "loss_scale": 1.0}
    assert default["communication_data_type"] == "fp32"
    assert default["data_types"] == {"grad_accum_dtype": "fp32"}
    assert (default["zero_allow_untested_optimizer"], default["zero_force_ds_cpu_optimizer"]) == (True, False)
    assert default["train_batch_size"] == 1 * 4 * 2
    for precision, stage, sums in (("fp32", 1, False), ("bf16", 1, False), ("fp16", 2, True)):
        given = deepspeed_config.filled(config(zero_stage=stage), decided(precision), workers=1, width=10)
        assert ("communication_data_type" in given) is (precision != "fp32")
        assert ("data_types" in given) is sums
        assert given["fp16"]["enabled"] is (precision == "fp16")
