"""The fused LoRA layer against PEFT's own, forward and backward; explicit attention against the fused kernel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig, LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from finray.config.schema import AdapterConfig
from finray.models import adapters, fused_lora
from tests.support import tiny


def model_with_lora(**fields: Any) -> Any:
    model = adapters.add_lora(tiny.build_model("llama"), AdapterConfig(**{"rank": 4, **fields}), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def gradients(model: Any, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    logits = model(input_ids=torch.arange(3, 40)[None]).logits
    logits.square().mean().backward()
    return logits.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
    }


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_it_is_pefts_arithmetic(dropout: float, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_lora, "_scales_in_products", lambda tensor: on_gpu)
    theirs = model_with_lora(alpha=3.0, dropout=dropout).train()
    ours = copy.deepcopy(theirs)
    assert fused_lora.fuse(ours) == 14
    expected, expected_grads = gradients(theirs, 0)
    actual, actual_grads = gradients(ours, 0)
    # What is not dropped is larger, and so is its rounding.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 / (1 - dropout) ** 2)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(actual_grads[name], grad, rtol=1e-4, atol=1e-7, msg=name)


def test_a_compiler_is_given_no_result_that_is_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.11 would lose gradients; the result is the same."""
    ours = model_with_lora(alpha=3.0).train()
    fused_lora.fuse(ours)
    expected, expected_grads = gradients(copy.deepcopy(ours), 0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "mm", lambda *_, **options: pytest.fail(f"torch.mm with {options}"))
    actual, actual_grads = gradients(ours, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(actual_grads[name], grad, rtol=1e-4, atol=1e-7, msg=name)


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name not in ("permute", "t", "transpose", "view", "detach", "new_empty", "expand")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("on_gpu", "kernels"), [(False, 18), (True, 14)])
def test_gradients_in_float64(on_gpu: bool, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against numerical differentiation, with and without dropout's second input and a bias."""
    monkeypatch.setattr(fused_lora, "_scales_in_products", lambda tensor: on_gpu)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, dtype=torch.float64) for size in ((6, 5), (4, 5), (4,)))
    a, b = torch.randn(2, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    dropped = torch.randn(6, 5, dtype=torch.float64)
    for tensor in (x, a, b, dropped):
        tensor.requires_grad_()

    def layer(*inputs: torch.Tensor | None) -> torch.Tensor:
        first, second, low, high = inputs
        return fused_lora._LoraLinear.apply(first, second, weight, bias, low, high, 0.5)

    for second in (None, dropped):
        output = layer(x, second, a, b)
        expected = x @ weight.T + bias + 0.5 * ((x if second is None else second) @ a.T) @ b.T
        torch.testing.assert_close(output, expected)
        wanted = [tensor for tensor in (x, second, a, b) if tensor is not None]
        with Kernels() as counted:
            layer(x, second, a, b).backward(torch.ones_like(output))
        assert counted.count == kernels + (0 if second is None else 3)
        ours = torch.autograd.grad(output.square().sum(), wanted, retain_graph=True)
        theirs = torch.autograd.grad(expected.square().sum(), wanted)
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left.double(), right, rtol=1e-6, atol=1e-6)


def test_dropout_is_random_in_training_and_off_after_it() -> None:
    """That only the adapter's input is dropped, and the rest scaled, is in the comparison with PEFT above."""
    model = model_with_lora(dropout=0.5)
    fused_lora.fuse(model)
    one, _ = gradients(model.train(), 0)
    same, _ = gradients(model, 0)
    other, _ = gradients(model, 1)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    plain = model_with_lora(dropout=0.0).eval()
    torch.testing.assert_close(gradients(model.eval(), 0)[0], gradients(plain, 1)[0])


def test_a_disabled_adapter_is_the_base_model() -> None:
    model = model_with_lora()
    fused_lora.fuse(model)
    tokens = torch.arange(3, 20)[None]
    with model.disable_adapter():
        torch.testing.assert_close(model(input_ids=tokens).logits, tiny.build_model("llama")(input_ids=tokens).logits)


def test_a_merged_adapter_is_not_added_twice() -> None:
    model = model_with_lora(alpha=3.0)
    fused_lora.fuse(model)
    tokens = torch.arange(3, 20)[None]
    expected = model(input_ids=tokens).logits
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_a_bias_and_one_whose_input_needs_no_gradient() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
    theirs = get_peft_model(net, LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=False))
    ours = copy.deepcopy(theirs)
    assert fused_lora.fuse(ours) == 2
    results = []
    for model in (theirs, ours):
        output = model(torch.linspace(-1, 1, 18).reshape(3, 6))
        own = {name: one for name, one in model.named_parameters() if one.requires_grad}
        results.append([output, *torch.autograd.grad(output.sin().sum(), list(own.values()))])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def test_what_is_more_than_plain_lora_keeps_pefts_forward() -> None:
    for bias in (True, False):
        made = get_peft_model(
            torch.nn.Sequential(torch.nn.Linear(6, 5)), LoraConfig(r=2, target_modules=["0"], lora_bias=bias)
        )
        assert fused_lora.fuse(made) == (0 if bias else 1)
    made.add_adapter("second", LoraConfig(r=2, target_modules=["0"]))
    assert fused_lora.fuse(made) == 0
    # GPT-2's layers are stored transposed.
    for family, fields in (("gpt2", {}), ("llama", {"method": "dora"}), ("llama", {"method": "pissa", "dropout": 0.1})):
        model = adapters.add_lora(tiny.build_model(family), AdapterConfig(**{"rank": 4, **fields}), seed=1)
        assert fused_lora.fuse(model) == 0


def test_pissa_and_its_start_are_one_product() -> None:
    theirs = adapters.add_lora(tiny.build_model("llama"), AdapterConfig(rank=4, method="pissa"), seed=1).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.add_(torch.full_like(parameter, 0.01))
    ours = copy.deepcopy(theirs)
    assert fused_lora.fuse(ours) == 14
    expected, expected_grads = gradients(theirs, 0)
    actual, actual_grads = gradients(ours, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert len(expected_grads) == 28
    for name, grad in expected_grads.items():
        torch.testing.assert_close(actual_grads[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_variant_of_lora_is_computed_as_peft_loads_it(tmp_path: Path) -> None:
    """KaSA scales the rank's dimensions, and takes a part of the base away."""
    base = tiny.build_model("llama")
    base.save_pretrained(str(tmp_path / "base"))
    made = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], kasa_config=KasaConfig()))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    made.save_pretrained(str(tmp_path / "adapter"))
    theirs, ours = (
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(str(tmp_path / "base")), str(tmp_path / "adapter")
        ).eval()
        for _ in range(2)
    )
    assert fused_lora.fuse(ours) == 0
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
