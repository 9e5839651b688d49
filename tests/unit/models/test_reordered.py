"""A model whose frozen weights are reordered says what it said before, with its adapter and without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from finray import compat
from finray.config.schema import AdapterConfig
from finray.models import adapters, fused_lora
from finray.models.head import plain_head
from finray.models.reordered import ReorderedLinear, reorder
from tests.support import tiny

pytestmark = pytest.mark.skipif(
    not compat.can_reorder(torch.zeros(1, 1)), reason="torch has no oneDNN for this machine's CPU"
)
IDS = torch.arange(3, 40)[None]


def with_lora(family: str, **fields: Any) -> Any:
    model = adapters.add_lora(tiny.build_model(family), AdapterConfig(**{"rank": 4, **fields}), seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    fused_lora.fuse(model)
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "gemma2"])
def test_logits_are_those_of_plain_weights(family: str) -> None:
    model = with_lora(family)
    other = copy.deepcopy(model)
    assert reorder(other) > 4
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-5, atol=1e-5)
    with model.disable_adapter(), other.disable_adapter():
        base = logits(model)
        torch.testing.assert_close(logits(other), base, rtol=1e-5, atol=1e-5)
    assert (logits(model) - base).abs().max() > 0.1, "the adapter changes something"


def test_in_bf16_a_sum_is_rounded_once_as_before() -> None:
    if not compat.can_reorder(torch.zeros(1, 1, dtype=torch.bfloat16)):
        pytest.skip("torch has no bf16 kernels for this CPU")
    exact, model = logits(with_lora("llama")), with_lora("llama").to(torch.bfloat16)
    plain = (logits(model).float() - exact).abs().mean()
    assert reorder(model) == 15
    assert 0 < (logits(model).float() - exact).abs().mean() < 1.2 * plain


def test_plain_weights_are_given_up_but_for_what_else_holds_them() -> None:
    model = tiny.build_model("llama", tie_word_embeddings=True).eval()
    expected = logits(model)
    assert reorder(model) == 15
    assert all(one.weight.is_mkldnn for one in model.modules() if isinstance(one, ReorderedLinear))
    assert not model.get_input_embeddings().weight.is_mkldnn
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    head = plain_head(model)
    assert head is not None
    hidden = torch.randn(3, 64)
    right = hidden @ model.get_input_embeddings().weight.detach().T
    torch.testing.assert_close(head.logits(hidden), right, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_read_by_peft_keeps_its_weight() -> None:
    model = with_lora("llama", method="dora")
    other = copy.deepcopy(model)
    assert reorder(other) == 1, "the head"
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-5, atol=1e-5)
