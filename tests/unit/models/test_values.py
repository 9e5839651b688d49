"""What a model is loaded with and as, and how far an export is from what was trained; each against a value by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models.export import relative_difference
from finray.models.loading import load_model
from finray.models.sharded import materialize


def test_a_difference_is_in_parts_of_the_spread_of_logits_or_of_the_largest_of_a_classifiers() -> None:
    logits = torch.tensor([[[1.0, 2.0], [4.0, 5.0]]])
    # Their standard deviation with n - 1 = 3 below.
    spread = (10 / 3) ** 0.5
    assert relative_difference(logits, logits + torch.tensor([0.0, -0.5])) == pytest.approx(0.5 / spread)
    classes = torch.tensor([[1.0, -4.0]])
    assert relative_difference(classes, classes + torch.tensor([0.5, 0.0])) == pytest.approx(0.5 / 4)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("asked", [None, "eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_has_the_dtype_and_the_attention_that_were_asked_for(
    tiny_model_dir: Path, on_meta: bool, asked: str | None, dtype: torch.dtype
) -> None:
    model: Any = load_model(ModelConfig(name=str(tiny_model_dir)), dtype=dtype, attention_name=asked, on_meta=on_meta)
    assert {one.dtype for one in model.parameters()} == {dtype}
    assert {one.is_meta for one in model.parameters()} == {on_meta}
    # Transformers' own choice on this machine.
    assert model.config._attn_implementation == (asked or "sdpa")


def test_a_buffer_that_the_files_hold_is_read_from_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    weights = load_file(tiny_model_dir / "model.safetensors")
    save_file({**weights, "model.kept": torch.arange(3.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    config = ModelConfig(name=str(tmp_path))
    model: Any = load_model(config, dtype=torch.float32, on_meta=True)
    with torch.device("meta"):
        model.model.register_buffer("kept", torch.zeros(3))
        model.model.register_buffer("computed", torch.zeros(3), persistent=False)
    assert materialize(model, config, AdapterConfig(method="none"), device=torch.device("cpu"), seed=0) is False
    assert model.model.kept.tolist() == [0.0, 1.0, 2.0]
    assert all(torch.equal(one, weights[name]) for name, one in model.named_parameters())
    assert model.model.computed.shape == (3,)
