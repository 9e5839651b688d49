"""How FSDP2 shares a model: no whole model anywhere, and copies of the shards where nodes are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from finray.config.resolved import PreparedRun
from finray.data.dataset.prepare import prepare_here
from finray.parallel.fsdp import FSDPStrategy
from finray.training.assemble import Assembled, assemble
from tests.support import runs, tiny
from tests.support.group import run_group
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run({"train.max_steps": 4, "parallel.strategy": "fsdp"}, rows=20)


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone(plain: Plain, run_dir: Path) -> Assembled:
    config = runs.config_of(plain)
    run_dir.mkdir()
    strategy = FSDPStrategy(torch.device("cpu"), config.parallel, precision="fp32")
    prepared = PreparedRun(prepare_here(config), runs.resolved_of(config))
    return assemble(config, prepared.resolved, prepared=prepared, run_dir=run_dir, strategy=strategy)


@pytest.mark.parametrize("method", ["lora", "none"])
def test_no_rank_reads_the_whole_model(
    method: str, plain: Plain, tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the whole model was read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    found = alone(changed(plain, {"adapter.method": method}), tmp_path / "run")
    parameters = list(found.loop.task.model.parameters())
    assert parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    found.loop.run()
    assert found.loop.final_loss is not None


@pytest.mark.parametrize(("tied", "method"), [(False, "none"), (True, "none"), (False, "lora")])
def test_an_embedding_is_summed_by_itself_where_it_is_trained_and_not_the_head_too(
    tied: bool, method: str, tiny_run: Callable[..., Plain], tokenizer: Any, tmp_path: Path, group: None
) -> None:
    tiny.save_model("llama", tmp_path / "model", tokenizer, tie_word_embeddings=tied)
    changes = {"parallel.strategy": "fsdp", "model.name": str(tmp_path / "model"), "adapter.method": method}
    task = alone(tiny_run(changes, rows=20), tmp_path / "run").loop.task
    inner = getattr(task.model, "base_model", task.model)
    assert isinstance(inner.get_input_embeddings(), FSDPModule) == (not tied and method == "none")
    assert isinstance(task.module, FSDPModule)


def test_copies_of_the_shards_and_kept_weights_change_nothing(tmp_path: Path, plain: Plain) -> None:
    """Four workers, two of which share a copy; and weights that are kept after the forward pass."""
    runs.run_alone(changed(plain, {"parallel.strategy": "ddp"}), tmp_path / "one")
    hybrid = changed(plain, {"parallel": {"shard_size": 2, "reshard_after_forward": False}})
    run_group(hybrid, tmp_path / "four", world_size=4)
    runs.assert_same_curve(tmp_path / "four", tmp_path / "one")
    left, right = (runs.adapter_weights(tmp_path / name / "checkpoint-000004") for name in ("one", "four"))
    assert runs.relative_difference(left, right) < 1e-4
