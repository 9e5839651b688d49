"""Every kind of adapter and of base: it learns, resumes to the bit, and loads in plain PEFT on the untouched base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import runs, tiny

WORDS = ["<begin>", "<end>"]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "rslora": {"adapter": {"method": "rslora"}},
    "dora": {"adapter": {"method": "dora"}},
    "pissa": {"adapter": {"method": "pissa"}},
    "lora+": {"adapter": {"lora_plus_ratio": 4.0}},
    "pattern": {"adapter": {"target_modules": r".*\.0\.self_attn\.[qv]_proj"}},
    "modules to save": {"adapter": {"modules_to_save": ["lm_head"]}},
    "new tokens": {"model": {"new_tokens": WORDS}},
    "4bit": {"model": {"quantization": "4bit"}},
    "8bit pissa": {"model": {"quantization": "8bit"}, "adapter": {"method": "pissa"}},
    "4bit dora": {"model": {"quantization": "4bit"}, "adapter": {"method": "dora"}},
    "4bit new tokens": {"model": {"quantization": "4bit", "new_tokens": WORDS}},
}
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return runs.settings(tiny_model_dir, tiny.write_chat_rows(folder, 30), folder)


def with_(plain: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {**plain, **{name: {**plain[name], **fields} for name, fields in sections.items()}}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    getattr(model, "get_base_model", lambda: model)().set_attn_implementation("sdpa")
    return model.eval()(input_ids=TOKENS).logits


def plain_peft(base: str, folder: Path) -> Any:
    """What a user without finray does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = len(AutoTokenizer.from_pretrained(str(folder)))
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(model, str(folder)).eval()


@pytest.mark.parametrize("case", CASES)
def test_a_run(case: str, plain: dict[str, Any], tmp_path: Path) -> None:
    settings = with_(plain, CASES[case])
    task = runs.run_alone(settings, tmp_path / "whole").loop.task
    losses = runs.values(tmp_path / "whole", "loss")
    assert sum(losses[-3:]) < sum(losses[:3])
    # Resumed.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-000008")
    runs.run_alone(settings, tmp_path / "cut")
    assert runs.trace(tmp_path / "cut") == runs.trace(tmp_path / "whole")
    name = "checkpoint-000008/adapter_model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # In plain PEFT.
    folder = (tmp_path / "whole" / name).parent
    for tensor_name, tensor in runs.adapter_weights(folder).items():
        assert tensor.abs().sum() > 0, tensor_name
    loaded = plain_peft(plain["model"]["name"], folder)
    if "quantization" not in settings["model"]:
        torch.testing.assert_close(logits(loaded), logits(task.model), rtol=1e-4, atol=1e-4)


def test_pissa_begins_at_the_base_model_with_its_principal_parts(plain: dict[str, Any], tmp_path: Path) -> None:
    settings = with_(plain, CASES["pissa"])
    task = runs.assemble_alone(settings, tmp_path).loop.task
    base = AutoModelForCausalLM.from_pretrained(plain["model"]["name"], dtype=torch.float32)
    torch.testing.assert_close(logits(task.model), logits(base), rtol=1e-3, atol=1e-4)
    layer = task.model.get_base_model().model.layers[0].mlp.up_proj
    weight = layer.base_layer.weight.detach()
    product = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    left = float(torch.linalg.norm(weight - product.detach()))
    # No matrix of this rank is nearer than by the singular values that are left out.
    least = float(torch.linalg.svdvals(weight)[4:].square().sum().sqrt())
    assert least <= left <= 1.0001 * least


def test_new_rows_begin_as_the_mean_and_alone_are_trained(plain: dict[str, Any], tmp_path: Path) -> None:
    settings = with_(plain, {"model": {"new_tokens": WORDS}})
    task = runs.assemble_alone(settings, tmp_path).loop.task
    tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
    base = AutoModelForCausalLM.from_pretrained(plain["model"]["name"], dtype=torch.float32)
    known = len(tokenizer)
    trained = {name: one for name, one in task.trainable().items() if ".lora_" not in name}
    assert len(trained) == 2
    for parameter, table in zip(trained.values(), (base.get_input_embeddings(), base.lm_head), strict=True):
        mean = table.weight.detach()[:known].mean(0)
        torch.testing.assert_close(parameter.detach(), torch.stack([mean, mean]))
