"""The formulas for kept activations, against what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.schema import AdapterConfig
from finray.data.sampling.collate import collate
from finray.models import adapters, attention, fused_lora
from finray.planning.activations import kept_bytes
from finray.planning.blueprint import Blueprint, draw_blueprint
from finray.planning.setup import Setup, Workload
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny

LENGTHS = (60, 300, 27)
# A wide model of two layers, so that what is counted is more than what is not (rotations, row statistics).
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
WIDE_GPT2 = {"n_embd": 256, "n_head": 8}
LORA = AdapterConfig(rank=8)
FULL = AdapterConfig(method="none")


def model_of(family: str, adapter: AdapterConfig, precision: str) -> Any:
    attention.register()
    overrides = WIDE_GPT2 if family == "gpt2" else {**WIDE, **({"sliding_window": 4096} if "gemma" in family else {})}
    model = tiny.build_model(family, **overrides)
    if precision == "bf16" and adapter.method == "lora":
        model = model.to(torch.bfloat16)
    model.set_attn_implementation(attention.NAME)
    model.config.use_cache = False
    return model


def really_kept(family: str, adapter: AdapterConfig, precision: str) -> int:
    """Bytes of all tensors that autograd keeps for the backward pass, weights and their casts left out."""
    model = model_of(family, adapter, precision)
    if adapter.method == "lora":
        model.requires_grad_(False)
        model = adapters.add_lora(model, adapter, seed=1)
        fused_lora.fuse(model)
    task = CausalLM(model.train(), precision=precision, attention_name=attention.NAME, device=torch.device("cpu"))
    generator = np.random.default_rng(0)
    rows = [(generator.integers(3, 380, n).astype(np.int32), np.ones(n, np.uint8)) for n in LENGTHS]
    batch = collate(rows, range(len(rows)))
    task.loss_sum(batch)
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {tuple(parameter.shape[::-1]) for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.loss_sum(batch)
    # The loss works its gradient out at once, and keeps it beside what autograd knows of.
    gradient: torch.Tensor = loss.grad_fn.gradients[0]  # type: ignore[union-attr]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) + gradient.nbytes


def counted(family: str, adapter: AdapterConfig, precision: str) -> tuple[Blueprint, Setup, Workload]:
    blueprint = draw_blueprint(model_of(family, adapter, precision), adapter)
    setup = Setup(precision="bf16" if precision == "bf16" else "fp32")
    return blueprint, setup, Workload(LENGTHS, sum(LENGTHS) - len(LENGTHS))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "gemma2"])
@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_counted_is_what_autograd_keeps(family: str, adapter: AdapterConfig, precision: str) -> None:
    really = really_kept(family, adapter, precision)
    assert kept_bytes(*counted(family, adapter, precision)) == pytest.approx(really, rel=0.1)


@pytest.mark.parametrize("forgotten", ["norms", "mlp", "attention"])
def test_a_forgotten_part_would_be_seen(forgotten: str) -> None:
    # Gemma has the most norms.
    blueprint, setup, work = counted("gemma3", LORA, "bf16")
    if forgotten == "norms":
        blueprint = replace(blueprint, norms=())
    else:
        blueprint = replace(blueprint, blocks=tuple(block for block in blueprint.blocks if block.kind != forgotten))
    assert kept_bytes(blueprint, setup, work) < 0.9 * really_kept("gemma3", LORA, "bf16")


def test_dropout_keeps_an_input_for_each_layer() -> None:
    blueprint, setup, work = counted("llama", LORA, "fp32")
    adapter = AdapterConfig(rank=8, dropout=0.5)
    with_dropout = kept_bytes(blueprint, replace(setup, dropout=True), work)
    # The first of the two layers keeps no masks for what it reads: frozen embeddings need no gradient.
    assert with_dropout == pytest.approx(really_kept("llama", adapter, "fp32"), rel=0.15)
    assert with_dropout > 1.1 * kept_bytes(blueprint, setup, work)


def test_long_rows_on_a_cpu_in_bf16_keep_no_scores() -> None:
    blueprint, _, _ = counted("llama", LORA, "bf16")
    setup = Setup(precision="bf16")
    short, long = (kept_bytes(blueprint, setup, Workload(rows, 1)) for rows in ((512, 512), (1024,)))
    assert long < short
    # Two layers of eight heads: 2 * 8 * 2 * 512**2 scores of two bytes are gone, outputs and statistics are there.
    assert short - long == 2 * (8 * 2 * 512**2 * 2 - 1024 * (2 * 256 + 4 * 8))
