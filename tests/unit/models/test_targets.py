"""Which layers get an adapter: experts that are one parameter, and models that also read images."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters, targets
from finray.models.artifacts import load_artifact, merge_adapter, read_artifact
from finray.models.export import export
from finray.models.loading import build_model
from finray.pretrained.weights import stored_weights
from tests.support import adapted, tiny

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])


def layers(model: Any) -> set[str]:
    """The names of what has an adapter, without the numbers of layers."""
    named = (name.partition(".lora_") for name, _ in model.named_parameters())
    found = (name.removeprefix("base_model.model.") for name, lora, _ in named if lora)
    return {re.sub(r"\.\d+\.", ".", name.replace(".base_layer", "")) for name in found}


def endings(names: Collection[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.EXPERTS)
def test_experts_are_adapted_and_merged_as_plain_peft_and_transformers_read_them(
    family: str, tmp_path: Path, tokenizer: Any
) -> None:
    base = tmp_path / "base"
    tiny.save_model(family, base, tokenizer)
    config, device = ModelConfig(name=str(base)), torch.device("cpu")
    options = {"precision": "fp32", "attention_name": None, "bits": None, "seed": 0, "device": device}
    model = build_model(config, AdapterConfig(rank=4), **options)
    assert {"experts", "q_proj" if family != "deepseek_v3" else "q_a_proj"} <= endings(layers(model))
    assert not [name for name in layers(model) if re.search(r"router|mlp\.gate$|expert_gate$", name)]
    # Each part of the adapter takes part: a gradient reaches all of it.
    loss: torch.Tensor = model.train()(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()  # type: ignore[no-untyped-call]
    ups = {name: weight for name, weight in model.named_parameters() if "lora_B" in name}
    assert not [name for name, weight in ups.items() if weight.grad is None or not weight.grad.any()]
    # As large a part of each, so that one that is left out shows.
    adapted.change(model, std=0.05)
    expected = logits(model)
    (tmp_path / "adapter").mkdir()
    adapted.save_adapter(model, tmp_path / "adapter")
    tokenizer.save_pretrained(str(tmp_path / "adapter"))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    assert apart(logits(plain), expected) > 0.1
    assert apart(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected) < 1e-5
    export(read_artifact(tmp_path / "adapter", base=str(base)), tmp_path / "merged", merge=True, dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert apart(logits(merged), expected) < 1e-5
    before, after = stored_weights(base), stored_weights(tmp_path / "merged")
    assert before is not None
    assert after is not None
    assert before.tensors.keys() == after.tensors.keys()


def test_an_adapter_that_peft_itself_put_on_experts_is_read_without_its_warnings(tmp_path: Path) -> None:
    """As earlier versions of finray did: `all-linear` is more than the router there, and has ranks of its own."""
    model = tiny.build_model("qwen3_moe")
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.change(theirs, std=0.05)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    artifact = read_artifact(tmp_path / "adapter", base=str(tmp_path / "base"))
    ours = load_artifact(artifact, dtype=torch.float32)
    assert "gate" in endings(layers(ours))
    expected = logits(theirs)
    assert apart(logits(ours), expected) < 1e-5
    assert apart(logits(merge_adapter(ours)), expected) < 1e-5


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("family", "asked", "expected"),
    [
        ("qwen2_moe", ["q_proj"], {"q_proj"}),
        # The names of the matrices of an expert, and of a shared one.
        (
            "qwen2_moe",
            ["q_proj", "gate_proj", "up_proj", "down_proj"],
            {"q_proj", "experts", "gate_proj", "up_proj", "down_proj"},
        ),
        ("qwen2_moe", ["shared_expert.up_proj"], {"up_proj"}),
        ("qwen3_moe", ["gate_up_proj"], {"experts"}),
        # The router, where it is named.
        ("qwen3_moe", ["q_proj", "gate"], {"q_proj", "gate"}),
        ("llama4", ["router"], {"router"}),
        ("llama4", r".*\.(q_proj|experts\.down_proj)", {"q_proj", "experts"}),
        # What there is to say of experts, PEFT says for plain LoRA without dropout only.
        ("qwen3_moe", "all-linear", ATTENTION | {"experts"}),
        # Mamba multiplies by the matrices of two layers without calling them, and its kernel by that of a third.
        ("mamba", "all-linear", {"in_proj"}),
        ("mistral3", ["q_proj"], {"q_proj"}),
        ("mistral3", r".*_proj", ATTENTION | {"gate_proj", "up_proj", "down_proj"}),
        ("mistral3", ["multi_modal_projector.linear_1"], {"linear_1"}),
    ],
)
def test_what_is_named_gets_an_adapter(family: str, asked: str | list[str], expected: set[str]) -> None:
    model = tiny.build_reader(family) if family == "mistral3" else tiny.build_model(family)
    model = adapters.add_lora(model, AdapterConfig(rank=4, target_modules=asked), seed=0)
    assert endings(layers(model)) == expected
    assert expected == {"linear_1"} or not [name for name in layers(model) if "vision" in name or "projector" in name]


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"method": "dora"}, {"method": "pissa"}])
def test_what_peft_cannot_do_with_experts_leaves_them_out_and_is_said(changes: dict[str, Any]) -> None:
    model = adapters.add_lora(tiny.build_model("qwen3_moe"), AdapterConfig(rank=4, **changes), seed=0)
    assert endings(layers(model)) == ATTENTION
    assert targets.described(model) == "attention 100%; none on the experts and router"


def test_a_name_that_matches_no_expert_is_an_error() -> None:
    with pytest.raises(ModelError, match="gate_up_prog"):
        adapters.add_lora(tiny.build_model("qwen3_moe"), AdapterConfig(target_modules=["gate_up_prog"]), seed=0)


def test_the_shares_of_an_adapter_are_of_its_parameters() -> None:
    model = adapters.add_lora(tiny.build_model("qwen3_moe"), AdapterConfig(rank=4), seed=0)
    # Two layers of four experts: 64 wide, 64 inside, gate and up in one matrix.
    assert targets.shares(model)["experts"] == 2 * 4 * 4 * ((64 + 2 * 64) + (64 + 64))
    assert sum(targets.shares(model).values()) == sum(
        weight.numel() for name, weight in model.named_parameters() if ".lora_" in name
    )
    # Of a model without such parts there is nothing to say that the config does not.
    assert targets.described(adapted.lora()) == ""
