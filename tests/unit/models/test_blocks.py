"""Blocks that keep less for the backward pass give the same gradients, and do keep less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finray.config.schema import AdapterConfig
from finray.models import adapters, attention, blocks, fused_lora, norms
from finray.models.blocks import blocks_of, wrap_blocks
from finray.tasks.causal_lm import CausalLM
from tests.support.packing import batch_of, gradients, packed_model, rows

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def task_of(family: str, *, lora: bool, targets: str | list[str] = "all-linear") -> CausalLM:
    model = packed_model(family)
    if lora:
        model.requires_grad_(False)
        model = adapters.add_lora(model, AdapterConfig(rank=4, dropout=0.2, target_modules=targets), seed=3)
        fused_lora.fuse(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    task = CausalLM(model, precision="fp32", attention_name=attention.NAME, device=CPU)
    task.model.train()
    # The comparison of the heads, once and for all.
    with torch.no_grad():
        task.outputs(batch_of(rows()))
    return task


def kept_bytes(task: CausalLM) -> tuple[int, dict[str, torch.Tensor]]:
    """What a forward pass keeps beside weights, and the gradients after it."""
    weights = {one.untyped_storage().data_ptr() for one in task.model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = task.outputs(batch_of(rows()))
    loss.backward()
    return sum(seen.values()), gradients(task.model)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {"checkpointing": "full"}),
        ("llama", {"checkpointing": "selective"}),
        ("llama", {"offload": True}),
        ("llama", {"checkpointing": "full", "offload": True}),
        ("gemma2", {"checkpointing": "selective"}),
        ("gpt2", {"checkpointing": "selective"}),
        # Biases of its experts are added in place.
        ("gpt_oss", {"checkpointing": "selective"}),
    ],
)
def test_gradients_are_the_same_to_the_bit(family: str, lora: bool, how: dict[str, Any]) -> None:
    targets: Any = ["q_proj"] if family == "gpt_oss" else "all-linear"
    _, expected = kept_bytes(task_of(family, lora=lora, targets=targets))
    task = task_of(family, lora=lora, targets=targets)
    wrap_blocks(task.model, **how, **({"smallest": 1} if "offload" in how else {}))
    _, found = kept_bytes(task)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Another mask of the dropout would be seen.
    if lora:
        torch.manual_seed(6)
        task.model.zero_grad()
        task.outputs(batch_of(rows())).backward()
        assert not all(torch.equal(one, expected[name]) for name, one in gradients(task.model).items())


def test_the_blocks_of_a_model_are_the_outermost_lists_of_modules_of_one_kind() -> None:
    class Block(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    model = torch.nn.Module()
    model.empty = torch.nn.ModuleList()
    model.encoder = torch.nn.ModuleList([Block(), Block()])
    model.mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)])
    model.sharing = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model.sharing[0].weight = model.sharing[1].weight
    model.without_weights = torch.nn.ModuleList([torch.nn.SiLU(), torch.nn.SiLU()])
    model.decoder = torch.nn.ModuleList([Block()])
    # Layers of a hybrid are of classes with a common one.
    model.hybrid = torch.nn.ModuleList([Block(), type("Other", (torch.nn.Linear,), {})(2, 2)])
    assert blocks_of(model) == [*model.encoder, *model.decoder, *model.hybrid]


def moved_bytes(task: CausalLM, monkeypatch: pytest.MonkeyPatch) -> tuple[int, set[int]]:
    found: list[torch.Tensor] = []
    real = blocks._pack

    def pack(moves: Any, tensor: torch.Tensor) -> Any:
        kept = real(moves, tensor)
        if not isinstance(kept, torch.Tensor):
            found.append(tensor)
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_pack", pack)
        task.outputs(batch_of(rows())).backward()
    return sum(one.nbytes for one in found), {one.untyped_storage().data_ptr() for one in found}


def test_activations_are_moved_and_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("llama", lora=True)
    weights = {one.untyped_storage().data_ptr() for one in task.model.parameters()}
    wrap_blocks(task.model, offload=True, smallest=1)
    size, moved = moved_bytes(task, monkeypatch)
    assert size > 0
    assert not moved & weights
    # With checkpointing it is the inputs of the two blocks, once each.
    both = task_of("llama", lora=True)
    wrap_blocks(both.model, checkpointing="full", offload=True, smallest=1)
    tokens = batch_of(rows()).tokens
    less, _ = moved_bytes(both, monkeypatch)
    assert 2 * tokens * 64 * 4 <= less < size / 3
    large = task_of("llama", lora=True)
    wrap_blocks(large.model, offload=True)
    assert moved_bytes(large, monkeypatch) == (0, set())


# torch's tracer looks at gradients of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("qwen2", "none"),
        ("llama", "selective"),
        pytest.param("llama", "none", marks=pytest.mark.nightly),
        pytest.param("llama", "full", marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks_serve_every_way_to_cut_tokens_into_rows(family: str, checkpointing: str) -> None:
    """Traced, and run as traced: what a compiler would be given once. Other lengths must not trace anew."""
    plain, compiled = (task_of(family, lora=True, targets=["q_proj", "down_proj"]) for _ in range(2))
    blocks.compile_blocks(compiled.model, backend="eager")
    norms.unfuse(plain.model)
    wrap_blocks(compiled.model, checkpointing=checkpointing)
    graphs = []
    try:
        for items in (rows(), rows()[:2], rows()[1:]):
            torch.manual_seed(5)
            expected = plain.outputs(batch_of(items))
            torch.manual_seed(5)
            found = compiled.outputs(batch_of(items))
            expected.backward()
            found.backward()
            assert found.item() == pytest.approx(expected.item(), rel=1e-6)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        attention.register()
        torch._dynamo.reset()
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3
    for name, one in gradients(plain.model).items():
        torch.testing.assert_close(gradients(compiled.model)[name], one, rtol=1e-4, atol=1e-6)
