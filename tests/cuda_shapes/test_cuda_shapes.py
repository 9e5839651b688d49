"""The CUDA path without a GPU: which kernels a step takes, with which shapes and dtypes, and that it never waits.

`make test-cuda-shapes` runs this with a CUDA build of torch; elsewhere it is skipped. What a GPU computes is tested in
tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from finray.config.schema import AdapterConfig, ParallelConfig, TrainConfig
from finray.data.sampling.collate import Batch
from finray.models import adapters, attention, fused_lora
from finray.models.blocks import blocks_of, wrap_blocks
from finray.models.roles import roles_of
from finray.parallel import fsdp
from finray.parallel.base import ProcessGroup
from finray.parallel.ddp import DDPStrategy
from finray.parallel.fsdp import FSDPStrategy
from finray.sharding import rows_like
from finray.tasks.causal_lm import CausalLM
from finray.training.loader import StepData
from finray.training.nonfinite import NonFiniteGuard
from finray.training.optim.optimizer import Optimizer
from finray.training.state import TrainState
from finray.training.step import evaluate, train_step
from tests.support.fake_cuda import DEVICE, Operations, fake_cuda, on_fake_cuda, two_fake_ranks
from tests.support.packing import batch_of, packed_model, rows

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch: make test-cuda-shapes")

VARLEN, VARLEN_BACKWARD = "torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYERS = 2


@contextmanager
def task_on_cuda(
    family: str, *, precision: str = "bf16", lora: bool = True, may_wait: bool = False, **wrapped: Any
) -> Iterator[tuple[CausalLM, Operations]]:
    """As `CausalLM.build` makes it: with LoRA frozen weights in the precision's dtype, else all of them in fp32."""
    model = packed_model(family)
    if lora:
        model = model.to(DTYPES[precision]).requires_grad_(False)
        model = adapters.add_lora(model, AdapterConfig(rank=4, dropout=0.1), seed=3)
        fused_lora.fuse(model)
    wrap_blocks(model, **wrapped)
    with fake_cuda(may_wait=may_wait) as operations:
        model = on_fake_cuda(model).train()
        task = CausalLM(model, precision=precision, attention_name=attention.NAME, device=DEVICE)
        # The comparison with the model's own head reads values, once in a run.
        task.packed._has_plain_head = True
        yield task, operations


def one_step(
    task: CausalLM, strategy: ProcessGroup, *, optimizer: str = "adamw", precision: str = "bf16"
) -> dict[str, torch.Tensor]:
    """A step of two micro-batches; the gradients that the optimizer was given."""
    train = TrainConfig(optimizer=optimizer, precision=precision)
    strategy.shard(task.module, blocks_of(task.model))
    made = Optimizer(task.trainable(), train, roles=roles_of(task.model))
    task.module, updates = strategy.prepare(task.module, made)
    state = TrainState(random_key=1, data="")
    guard = NonFiniteGuard(state, DEVICE, scaled=precision == "fp16")
    gradients: dict[str, torch.Tensor] = {}
    update = updates.step

    def watched(learning_rate: float, *, found_inf: torch.Tensor | None = None) -> None:
        gradients.update({name: one.grad for name, one in updates.parameters.items() if one.grad is not None})
        update(learning_rate, found_inf=found_inf)

    updates.step = watched  # type: ignore[method-assign]
    batches = [(index, batch_of(rows(seed=index))) for index in range(2)]
    weight = sum(len(batch.targets_K) for _, batch in batches)
    data = StepData(batches, weight=weight, supervised=weight, tokens=0, samples=(0, 1), items=2)
    result = train_step(task, strategy, updates, data, state, guard, learning_rate=1e-3, max_grad_norm=1.0)
    assert (result.loss.dtype, result.loss.device) == (torch.float64, DEVICE)
    assert not result.grad_norm.shape
    return gradients


def assert_like(gradients: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]) -> None:
    """Every trained parameter has a gradient of its own shape and dtype, and moments are fp32."""
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        gradient = gradients[name]
        assert (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, torch.float32, DEVICE), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_bf16_step_takes_the_varlen_kernel_in_every_layer(family: str, lora: bool) -> None:
    with task_on_cuda(family, lora=lora) as (task, operations):
        assert_like(one_step(task, DDPStrategy(DEVICE)), task.trainable())
    assert operations.seen[VARLEN] == operations.seen[VARLEN_BACKWARD] == 2 * LAYERS
    assert not [name for name in operations.seen if "scaled_dot_product" in name]
    assert operations.seen["aten._fused_adamw_.tensor_lr"] + operations.seen["aten._fused_adamw_.default"]


def test_fp32_and_softcapped_attention_do_not_take_the_kernel_that_cannot_do_them() -> None:
    for family, precision in (("llama", "fp32"), ("gemma2", "bf16")):
        with task_on_cuda(family, precision=precision) as (task, operations):
            assert_like(one_step(task, DDPStrategy(DEVICE), precision=precision), task.trainable())
        assert not operations.seen[VARLEN]


@pytest.mark.parametrize("kept", [{"checkpointing": "full"}, {"checkpointing": "selective"}])
def test_a_step_that_keeps_less_gives_the_same_gradients_shapes(kept: dict[str, Any]) -> None:
    with task_on_cuda("llama", **kept) as (task, operations):
        assert_like(one_step(task, DDPStrategy(DEVICE)), task.trainable())
    # Full checkpointing computes attention again; selective checkpointing keeps its output.
    again = 2 if kept.get("checkpointing") == "full" else 1
    assert operations.seen[VARLEN] == 2 * LAYERS * again


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_optimizer_waits_for_the_device_to_skip_an_update(optimizer: str, precision: str) -> None:
    with task_on_cuda("llama", lora=False, precision=precision) as (task, _):
        assert_like(one_step(task, DDPStrategy(DEVICE), optimizer=optimizer, precision=precision), task.trainable())


def test_an_evaluation_keeps_sums_on_the_device() -> None:
    class Loader:
        rows = 4
        passes = 2

        def batches_before(self) -> Iterator[tuple[Batch, bool]]:
            return iter(())

        def batches(self) -> Iterator[tuple[Batch, bool]]:
            yield batch_of(rows()), True
            yield batch_of(rows(seed=1)), False

    with task_on_cuda("llama") as (task, _), pytest.raises(DataDependentOutputException) as raised:
        # The one wait is for the sums, at the end.
        evaluate(task, DDPStrategy(DEVICE), Loader())  # type: ignore[arg-type]
    assert raised.traceback[-1].name != "score"
    assert any("tolist" in str(entry.statement) for entry in raised.traceback)


def test_what_waits_for_the_device_is_seen() -> None:
    """Negative control: reading a number, a copy to the CPU, and a synchronization in a step are each refused."""

    def number(loss: torch.Tensor) -> None:
        loss.item()

    def copy(loss: torch.Tensor) -> None:
        loss.to("cpu")

    def synchronize(loss: torch.Tensor) -> None:
        torch.cuda.synchronize()

    for wait in (number, copy, synchronize):
        with task_on_cuda("llama") as (task, _):
            loss_sum = task.outputs

            def waiting(batch: Batch, wait: Any = wait, loss_sum: Any = loss_sum) -> torch.Tensor:
                loss: torch.Tensor = loss_sum(batch)
                wait(loss)
                return loss

            task.outputs = waiting  # type: ignore[method-assign]
            with pytest.raises((AssertionError, DataDependentOutputException)):
                one_step(task, DDPStrategy(DEVICE))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_fsdp_gathers_in_bf16_and_reduces_fp32_shards(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    with two_fake_ranks() as mesh, task_on_cuda("llama", lora=lora) as (task, operations):
        monkeypatch.setattr(fsdp, "init_device_mesh", lambda device, shape, **names: mesh)
        strategy = FSDPStrategy(DEVICE, ParallelConfig(strategy="fsdp"), precision="bf16")
        gradients = one_step(task, strategy)
        trained = task.trainable()
        assert gradients.keys() == trained.keys()
        for name, parameter in trained.items():
            local, held = gradients[name].to_local(), parameter.to_local()
            assert (local.shape, local.dtype, local.device) == (held.shape, torch.float32, DEVICE), name
            assert held.numel() * 2 == parameter.numel()
    assert operations.seen[VARLEN] == operations.seen[VARLEN_BACKWARD] == 2 * LAYERS
    # A block is gathered for the forward pass and again for the backward pass, the rest once; twice, for two batches.
    # The rest is one group, or two where the embedding is trained.
    gather, reduce = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
    rest = 1 if lora else 2
    assert (operations.seen[gather], operations.dtypes[gather]) == (2 * (2 * LAYERS + rest), {torch.bfloat16})
    # With LoRA nothing outside the blocks is trained.
    reduced = LAYERS if lora else LAYERS + rest
    assert (operations.seen[reduce], operations.dtypes[reduce]) == (2 * reduced, {torch.float32})


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_offloaded_gradients_are_clipped_and_applied_in_cpu_memory(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    """Where the loss and what is watched of it are on the device. torch itself waits for each gradient's copy."""
    with two_fake_ranks() as mesh, task_on_cuda("llama", lora=lora, may_wait=True) as (task, _):
        monkeypatch.setattr(fsdp, "init_device_mesh", lambda device, shape, **names: mesh)
        offloaded = ParallelConfig(strategy="fsdp", cpu_offload=True)
        strategy = FSDPStrategy(DEVICE, offloaded, precision="bf16")
        gradients = one_step(task, strategy)
        assert gradients.keys() == task.trainable().keys()
        assert {one.to_local().device.type for one in gradients.values()} == {"cpu"}
        # As moments of other optimizers are: torch would move them to the mesh's device.
        name, parameter = next(iter(task.trainable().items()))
        made = rows_like(parameter.to_local().detach().clone(), parameter, tuple(parameter.shape))
        assert (made.to_local().device.type, made.shape) == ("cpu", parameter.shape), name
