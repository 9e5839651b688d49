"""How an adapter begins: as PEFT's own begins, but drawn for each matrix from the seed and its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finray.config.schema import AdapterConfig
from finray.models import adapters


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
