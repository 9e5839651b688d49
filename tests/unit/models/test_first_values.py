"""How an adapter begins: as PEFT's own begins, but drawn for each matrix from the seed and its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finray.config.schema import AdapterConfig
from finray.errors import ModelError
from finray.models import adapters
from finray.models.adapter_methods import DORA, LORA, PISSA, first_values
from tests.support import tiny


class Net(torch.nn.Module):
    """Layers and a table that are wide enough to tell distributions apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(500, 64)
        self.wide = torch.nn.Linear(400, 100)
        self.narrow = torch.nn.Linear(100, 400)
        self.again = torch.nn.Linear(100, 400)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def get_output_embeddings(self) -> None:
        return None


TARGETS = ["table", "wide", "narrow", "again"]


def first(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("method", ["lora", "rslora"])
def test_the_first_values_are_spread_as_pefts_are(method: str) -> None:
    section = AdapterConfig(method=method, rank=48, target_modules=TARGETS)
    ours = first(adapters.add_lora(Net(), section, seed=3, task_type="FEATURE_EXTRACTION"))
    torch.manual_seed(0)
    theirs = first(get_peft_model(Net(), LoraConfig(r=48, target_modules=TARGETS)))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        expected = theirs[name]
        assert value.shape == expected.shape
        assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.05), name
        assert float(value.mean()) == pytest.approx(0.0, abs=4 * float(expected.std()) / value.numel() ** 0.5 + 1e-12)
        # Uniform or normal: the two differ in how far they reach.
        assert float(value.abs().max()) == pytest.approx(float(expected.abs().max()), rel=0.25), name
    # Kaiming's bound, for PEFT's `a` of sqrt(5).
    assert float(ours["base_model.model.wide.lora_A.default.weight"].abs().max()) == pytest.approx(400**-0.5, rel=1e-3)
    zero = {name for name, value in ours.items() if not value.any()}
    assert zero == {name for name, value in theirs.items() if not value.any()} != set()


def test_matrices_of_one_shape_are_drawn_apart() -> None:
    ours = first(
        adapters.add_lora(Net(), AdapterConfig(target_modules=TARGETS), seed=3, task_type="FEATURE_EXTRACTION")
    )
    one, other = (ours[f"base_model.model.{name}.lora_A.default.weight"].flatten() for name in ("narrow", "again"))
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.1


def test_the_first_values_of_a_name_and_a_seed_are_pinned() -> None:
    """Another version would begin the same run otherwise."""
    pinned = [0.0709943, -0.4705942, -0.4887754, 0.3952277, -0.356905, 0.1433751]
    value = first_values(LORA, seed=3, scaling=lambda name: 1.0, base=lambda name: torch.eye(2))
    found = value("model.layers.0.q_proj.lora_A.default.weight", torch.Size((2, 3)))
    assert found.flatten().tolist() == pytest.approx(pinned, abs=1e-6)
    assert not value("model.layers.0.q_proj.lora_B.default.weight", torch.Size((3, 2))).any()


def test_dora_begins_with_the_norms_of_the_rows_and_pissa_with_the_principal_parts() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5) @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]))
    asked: list[str] = []

    def base(name: str) -> torch.Tensor:
        asked.append(name)
        return weight

    value = first_values(DORA, seed=3, scaling=lambda name: 1.0, base=base)
    norms = value("m.lora_magnitude_vector.default.weight", torch.Size((7,)))
    torch.testing.assert_close(norms, weight.square().sum(dim=1).sqrt())
    asked.clear()
    value = first_values(PISSA, seed=3, scaling=lambda name: 0.25, base=base)
    down = value("m.lora_A.default.weight", torch.Size((2, 5)))
    up = value("m.lora_B.default.weight", torch.Size((7, 2)))
    # Decomposed once for both.
    assert asked == ["m"]
    u, s, vh = torch.linalg.svd(weight)
    best = u[:, :2] @ torch.diag(s[:2]) @ vh[:2]
    torch.testing.assert_close(0.25 * up @ down, best, rtol=1e-4, atol=1e-4)
    # Both carry the square roots; the largest entry of each column is positive, on any machine.
    torch.testing.assert_close(0.5 * up.norm(dim=0), s[:2].sqrt(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(0.5 * down.norm(dim=1), s[:2].sqrt(), rtol=1e-4, atol=1e-4)
    assert bool((up.gather(0, up.abs().argmax(dim=0, keepdim=True)) > 0).all())
    residual = value("m.lora_B.pissa_residual.weight", torch.Size((7, 2)))
    assert torch.equal(residual, -up)
    assert torch.equal(value("m.lora_A.pissa_residual.weight", torch.Size((2, 5))), down)
    with pytest.raises(ModelError, match="PiSSA of rank 6 needs matrices that are as large: `m` is 7 x 5") as caught:
        value("m.lora_A.default.weight", torch.Size((6, 5)))
    assert "5 or less" in str(caught.value.repair)
    # A table has no principal parts.
    assert value("m.lora_embedding_B.default.weight", torch.Size((7, 2))).any()


@pytest.mark.parametrize(
    ("method", "scaling", "dora"),
    [("lora", 12 / 9, False), ("rslora", 12 / 3, False), ("dora", 12 / 9, True), ("pissa", 12 / 9, False)],
)
def test_a_method_is_what_its_name_says(method: str, scaling: float, dora: bool) -> None:
    section = AdapterConfig(method=method, rank=9, alpha=12, target_modules=["wide"])
    made = adapters.add_lora(Net(), section, seed=3, task_type="FEATURE_EXTRACTION")
    layer = made.get_base_model().wide
    assert layer.scaling["default"] == pytest.approx(scaling)
    assert any("magnitude" in name for name in first(made)) is dora
    assert ("pissa_residual" in layer.lora_A) is (method == "pissa")


@pytest.mark.parametrize("method", ["dora", "pissa"])
def test_an_adapter_on_layers_that_are_stored_transposed_changes_nothing_at_its_start(method: str) -> None:
    """GPT-2's are (in, out): norms of rows and principal parts are those of the other way round."""
    tokens = torch.arange(3, 20)[None]
    expected = tiny.build_model("gpt2").eval()(input_ids=tokens).logits
    made = adapters.add_lora(tiny.build_model("gpt2"), AdapterConfig(method=method, rank=4), seed=3).eval()
    layer = made.get_base_model().transformer.h[0].attn.c_attn
    assert (layer.lora_A["default"].weight.shape, layer.lora_B["default"].weight.shape) == ((4, 64), (192, 4))
    torch.testing.assert_close(made(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
