"""Packed weights: as small as they should be, unpacked as bitsandbytes does, and no part of what a row learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters
from finray.models.artifacts import Artifact, load_as_trained
from finray.models.loading import load_model
from finray.models.quantized import QuantizedLinear, quantize_layers
from finray.models.saved_layout import WEIGHTS, SavedLayout
from finray.planning.blueprint import build_blueprint
from finray.planning.estimate import Setup, adapter_bytes, weight_bytes
from tests.support import tiny

pytestmark = pytest.mark.long


def packed(weight: torch.Tensor, bits: int, dtype: torch.dtype) -> QuantizedLinear:
    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer = QuantizedLinear(plain, bits, dtype)
    content = layer.pack(weight)
    assert content.shape == layer.weight.shape
    assert content.dtype == dtype
    layer.weight = torch.nn.Parameter(content, requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "error"), [(4, 0.2), (8, 0.02)])
def test_product_and_gradient_are_those_of_the_unpacked_weight(bits: int, error: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64).to(dtype)
    layer = packed(weight, bits, dtype)
    assert float((layer.dequantize() - weight).abs().mean()) < error * float(weight.abs().mean())
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_()
    output = layer(x)
    (grad,) = torch.autograd.grad(output.float().square().sum(), x)
    other = x.detach().clone().requires_grad_()
    expected = other @ layer.dequantize().T
    (expected_grad,) = torch.autograd.grad(expected.float().square().sum(), other)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_four_bits_are_nf4_with_double_quantization() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    layer = packed(weight, 4, torch.float32)
    assert layer.scales.quant_type == "nf4"
    assert layer.scales.nested
    content, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(layer.dequantize(), dequantize_4bit(content, state))


def test_eight_bits_are_int8_with_a_scale_for_each_row() -> None:
    """The largest of a row is 127."""
    torch.manual_seed(0)
    weight = (torch.randn(48, 64) * torch.logspace(-2, 1, 48)[:, None]).half().float()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    torch.testing.assert_close(packed(weight, 8, torch.float32).dequantize() / scale, (weight / scale).round())


def storages(model: Any) -> int:
    """Bytes of everything that a model keeps: weights, buffers, and the scales beside packed weights."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.bits == 8:
            tensors.append(module.scales)
        elif isinstance(module, QuantizedLinear):
            inner = module.scales.state2
            tensors += [module.scales.absmax, module.scales.code, inner.absmax, inner.code, module.scales.offset]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.nightly
def test_memory_of_a_real_model_is_what_the_estimate_says(smollm2_dir: Path, tmp_path: Path) -> None:
    base = ModelConfig(name=str(smollm2_dir))
    adapter = AdapterConfig(rank=2, target_modules=["q_proj"])
    blueprint = build_blueprint(base, adapter)
    whole = adapters.add_lora(load_model(base, dtype=torch.float32), adapter, seed=1)
    layout = SavedLayout(whole)
    save_file(layout.tensors(), tmp_path / WEIGHTS)
    layout.save_settings(tmp_path)
    model = load_as_trained(Artifact(tmp_path, base, {}), bits=4)
    setup = Setup(storage_bits=4)
    expected = weight_bytes(blueprint, setup) + adapter_bytes(blueprint, setup)
    assert storages(model) == pytest.approx(expected, rel=0.02)
    assert storages(whole) > 1.8 * storages(model)


def test_the_head_and_what_is_trained_whole_stay_as_they_are() -> None:
    with torch.device("meta"):
        model = tiny.build_model("llama")
    # All layers in a module.
    plain = {f"model.layers.{layer}.mlp.{one}_proj" for layer in (0, 1) for one in ("gate", "up", "down")}
    assert quantize_layers(model, 4, dtype=torch.bfloat16, keep=["mlp"]) == 14 - len(plain)
    found = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert found == {"lm_head", *plain}


def test_a_model_without_linear_layers_is_refused() -> None:
    with torch.device("meta"):
        model = tiny.build_model("gpt2")
    with pytest.raises(ModelError, match="no linear layers"):
        quantize_layers(model, 4, dtype=torch.bfloat16)
