"""Liger's layers are for one model, on a GPU; whatever else the process computes has Transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from finray import compat
from finray.models import liger
from tests.support import tiny


def kernel(q: Any, *rest: Any, **options: Any) -> str:
    """As Triton's, for GPUs only."""
    if not q.is_cuda:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    return "by the kernel"


class Norm(torch.nn.Module):
    """A layer that computes by a kernel."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> Any:
        return kernel(x)


OWN = modeling_llama.apply_rotary_pos_emb
# What Liger was told.
told: list[dict[str, Any]] = []


def patch(model: Any, **options: Any) -> None:
    """What Liger does to the module of Llama; it gives the model its layers as well."""
    told.append(options)
    if options.get("rope", True):
        modeling_llama.apply_rotary_pos_emb = kernel
    modeling_llama.LlamaRMSNorm = Norm  # type: ignore[misc]
    model.model.norm = Norm()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model with Liger's layers; the module of its family is as before after the test."""
    monkeypatch.setattr(compat, "liger_patcher", lambda: (patch, frozenset({"llama"})))
    model = tiny.build_model("llama")
    liger.apply(model)
    yield model
    liger.restore()
    assert modeling_llama.apply_rotary_pos_emb is OWN
    assert modeling_llama.LlamaRMSNorm is not Norm


def test_a_model_on_a_cpu_is_as_before_in_a_process_that_trains_with_liger(patched: Any) -> None:
    tokens = torch.arange(3, 30)[None]
    # The reference is made where nothing was patched: Qwen2 without its biases is Llama.
    other = tiny.build_model("llama")
    assert type(other.model.norm).__name__ == "LlamaRMSNorm"
    found = other(input_ids=tokens).logits
    again = tiny.build_model("qwen2").eval()
    again.load_state_dict(
        {name: other.state_dict().get(name, torch.zeros_like(one)) for name, one in again.state_dict().items()}
    )
    torch.testing.assert_close(found, again(input_ids=tokens).logits)
    with pytest.raises(ValueError, match="cpu tensor"):
        patched(input_ids=tokens)


def test_what_is_on_a_gpu_goes_through_the_kernel(patched: Any) -> None:
    assert modeling_llama.apply_rotary_pos_emb(SimpleNamespace(is_cuda=True), None, None, None) == "by the kernel"
    assert isinstance(patched.model.norm, Norm)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_what_changes_queries_in_place_is_left_out_where_they_are_stored(checkpointing: str) -> None:
    """Stored before they are rotated, and rotated again when the layer is computed again: tests/gpu shows it."""
    liger.apply(tiny.build_model("llama"), checkpointing=checkpointing)
    on_gpu, rest = SimpleNamespace(is_cuda=True), (None, None, None)
    if checkpointing == "selective":
        # Also after a model in the same process that had it.
        assert modeling_llama.apply_rotary_pos_emb is OWN
    else:
        assert modeling_llama.apply_rotary_pos_emb(on_gpu, *rest) == "by the kernel"
    usual = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert told[-1] == usual | ({"rope": False} if checkpointing == "selective" else {})


def test_a_classifier_that_liger_does_not_know_keeps_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Gemma 3, of which it knows the language model."""

    def refuse(model: Any, **options: Any) -> None:
        raise TypeError("The model must be LlamaForCausalLM.")

    monkeypatch.setattr(compat, "liger_patcher", lambda: (refuse, frozenset({"llama"})))
    liger.apply(tiny.build_classifier("llama"))
    assert modeling_llama.apply_rotary_pos_emb is OWN
