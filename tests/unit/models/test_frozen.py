"""Frozen layers whose bias is added in their product: the arithmetic of torch's layers, and when it is done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finray import compat
from finray.models import blocks, frozen, fused_lora

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not compat.can_reorder(torch.zeros(1, 1, dtype=BF16)), reason="torch has no bf16 kernels for this CPU"
)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that adds its bias."""
    rows: list[int] = []
    real = compat.onednn_linear

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(x))
        return real(x, *others)

    monkeypatch.setattr(compat, "onednn_linear", counted)
    return rows


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 16))
    return made.requires_grad_(False)


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    output = model(x)
    trained = [one for one in model.parameters() if one.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.double().sin().sum(), [x, *trained])]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((one.double() - true).norm() / true.norm()) for one, true in zip(found, exact, strict=True)]


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24)])
def test_inputs_without_rows_are_those_of_torchs(shape: tuple[int, ...]) -> None:
    model, x = net().to(BF16), torch.randn(shape).to(BF16)
    expected = model(x)
    frozen.fuse_biases(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 24)])
@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_gradient_are_at_least_as_exact_as_torchs(
    shape: tuple[int, ...], autocast: bool, fused: list[int]
) -> None:
    plain = net().to(BF16)
    x = torch.randn(shape).to(BF16)
    exact = results(copy.deepcopy(plain).double(), x.double())
    ours = copy.deepcopy(plain)
    assert frozen.fuse_biases(ours) == 2
    given = x.float() if autocast else x
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        found, theirs = results(ours, given), results(plain, given)
    assert found[0].dtype == BF16
    assert [one.shape for one in found] == [one.shape for one in exact]
    assert fused == [x.numel() // 24] * 2
    for mine, other in zip(error(found, exact), error(theirs, exact), strict=True):
        assert mine < max(1.2 * other, 0.01)


def test_other_layers_are_torchs(fused: list[int]) -> None:
    model = net()
    model[2].bias.requires_grad_(True)
    assert frozen.fuse_biases(model) == 1, "what is trained is left alone"
    assert frozen.fuse_biases(model) == 0, "once is enough"
    assert frozen.fuse_biases(torch.nn.Linear(3, 4, bias=False).requires_grad_(False)) == 0
    x = torch.randn(3, 24)
    torch.testing.assert_close(model(x), net()(x))
    with compat.fake_tensors():
        assert model.to(BF16)(torch.ones(3, 24, dtype=BF16)).shape == (3, 16)
    assert fused == []


def test_a_lora_layer_adds_base_bias_and_adapter_at_once(fused: list[int]) -> None:
    plain = net().to(BF16)
    theirs = get_peft_model(plain, LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=False))
    ours = copy.deepcopy(theirs)
    assert fused_lora.fuse(ours) == 2
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(9, 24).to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        found, expected = results(ours, x), results(theirs, x)
    assert fused == [9, 9]
    reference = results(exact, x.double())
    for mine, other in zip(error(found, reference), error(expected, reference), strict=True):
        assert mine < max(1.2 * other, 0.01)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_selective_checkpointing_stores_the_product(checkpointing: str, fused: list[int]) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([net(1).to(BF16), net(2).to(BF16)])
    x = torch.randn(5, 24).to(BF16).requires_grad_()
    frozen.fuse_biases(model)
    (expected,) = torch.autograd.grad(sum(layer(x).float().sum() for layer in model.layers), x)
    fused.clear()
    blocks.wrap_blocks(model, checkpointing=checkpointing)
    total = sum(layer(x).float().sum() for layer in model.layers)
    (found,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(found, expected)
    kept: list[str] = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if "_linear_pointwise" in str(func):
                kept.append(str(func))
            return func(*args, **(kwargs or {}))

    with Products():
        torch.autograd.grad(sum(layer(x).float().sum() for layer in model.layers), x)
    # The second of a layer is not needed for its own gradient.
    assert len(kept) == (4 if checkpointing == "selective" else 8)
