"""Every kind of adapter and of base: it learns, resumes to the bit, and loads in plain PEFT on the untouched base."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.config.resume_adapter import with_start
from finray.models.artifacts import read_artifact
from finray.models.export import export
from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed

WORDS = ["<begin>", "<end>"]
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"adapter.method": "rslora"},
    "dora": {"adapter.method": "dora"},
    "pissa": {"adapter.method": "pissa"},
    "lora+": {"adapter.lora_plus_ratio": 4.0},
    "pattern": {"adapter.target_modules": r".*\.0\.self_attn\.[qv]_proj"},
    "modules to save": {"adapter.modules_to_save": ["lm_head"]},
    "new tokens": {"model.new_tokens": WORDS},
    "4bit": {"model.quantization": "4bit"},
    "8bit pissa": {"model.quantization": "8bit", "adapter.method": "pissa"},
    "4bit dora": {"model.quantization": "4bit", "adapter.method": "dora"},
    "4bit new tokens": {"model.quantization": "4bit", "model.new_tokens": WORDS},
}
LAST = "checkpoint-000008"
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    getattr(model, "get_base_model", lambda: model)().set_attn_implementation("sdpa")
    return model.eval()(input_ids=TOKENS.to(model.device)).logits.cpu()


def plain_peft(base: str, folder: Path) -> Any:
    """What a user without finray does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = len(AutoTokenizer.from_pretrained(str(folder)))
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(model, str(folder)).eval()


Trained = Callable[[str], tuple[Path, torch.Tensor]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Trained:
    """A case trained by one process, when it is first asked for: run directory, and logits of the model at its end."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def train(case: str) -> tuple[Path, torch.Tensor]:
        task = runs.run_alone(changed(plain, CASES[case]), folder / case).loop.task
        return folder / case, logits(task.model)

    return train


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_resumes_to_the_bit(case: str, trained: Trained, plain: Plain, tmp_path: Path) -> None:
    whole, _ = trained(case)
    losses = runs.values(whole, "loss")
    assert sum(losses[-3:]) < sum(losses[:3])
    runs.run_alone(changed(plain, CASES[case]), runs.cut(whole, tmp_path / "cut"))
    assert runs.trace(tmp_path / "cut") == runs.trace(whole)
    name = f"{LAST}/adapter_model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (whole / name).read_bytes()
    # What holds of plain LoRA too would say nothing of the others.
    if case != "lora":
        assert losses[-1] != pytest.approx(runs.values(trained("lora")[0], "loss")[-1], rel=1e-4)


def is_packed(case: str) -> bool:
    return "model.quantization" in CASES[case]


@pytest.mark.parametrize("case", CASES)
def test_it_loads_in_plain_peft_and_merges(case: str, trained: Trained, plain: Plain, tmp_path: Path) -> None:
    run_dir, expected_logits = trained(case)
    folder = run_dir / LAST
    for name, tensor in runs.adapter_weights(folder).items():
        assert tensor.abs().sum() > 0, name
    loaded = logits(plain_peft(plain["model"]["name"], folder))
    if not is_packed(case):
        torch.testing.assert_close(loaded, expected_logits, rtol=1e-4, atol=1e-4)
    exported = export(read_artifact(folder), tmp_path / "merged", merge=True, dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), loaded, rtol=1e-4, atol=1e-4)
    assert exported.onto == plain["model"]["name"]
    notes = json.loads((tmp_path / "merged" / "finray.json").read_text())
    assert notes["merged_onto"] == exported.onto
    if is_packed(case):
        # What was trained is what is compared with: the difference is that of the packed base.
        spread = float(expected_logits.std())
        expected = float((expected_logits - loaded).abs().max()) / spread
        assert exported.trained_on == CASES[case]["model.quantization"]
        assert exported.rounding is not None
        assert 0.1 * expected < exported.rounding < 10 * expected
        assert notes["difference_from_training"] == exported.rounding
    else:
        assert exported.trained_on is exported.rounding is None


def test_two_ranks_give_the_same_curves_and_files(trained: Trained, plain: Plain, tmp_path: Path) -> None:
    wanted = [("fsdp", "dora"), ("fsdp", "8bit pissa"), ("fsdp", "4bit new tokens"), ("ddp", "8bit pissa")]
    jobs = [
        (changed(plain, CASES[case], {"parallel.strategy": strategy}), tmp_path / strategy / case)
        for strategy, case in wanted
    ]
    run_all(jobs, world_size=2)
    for _, run in jobs:
        whole, _ = trained(run.name)
        assert runs.values(run, "loss") == pytest.approx(runs.values(whole, "loss"), rel=1e-4), run
        expected, found = (runs.adapter_weights(one / LAST) for one in (whole, run))
        assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in expected.items()}
        for name, tensor in found.items():
            assert tensor.abs().sum() > 0, name


@pytest.mark.parametrize("case", ["dora", "pissa", "new tokens", "4bit"])
def test_another_run_goes_on_from_an_adapter(case: str, trained: Trained, plain: Plain, tmp_path: Path) -> None:
    run_dir, expected = trained(case)
    folder = run_dir / LAST
    settings = changed(plain, {"model.quantization": "4bit"} if is_packed(case) else {})
    settings["adapter"] = {"start_from": str(folder)}
    config = with_start(runs.config_of(settings)).plain()
    assembled = runs.assemble_alone(config, tmp_path)
    torch.testing.assert_close(logits(assembled.loop.task.model), expected, rtol=1e-4, atol=1e-4)
    assembled.loop.task.model.get_base_model().set_attn_implementation("finray_packed")
    assembled.loop.run()
    assert runs.values(tmp_path, "loss")[0] < runs.values(run_dir, "loss")[0]


def test_pissa_begins_at_the_base_model_with_its_principal_parts(plain: Plain, tmp_path: Path) -> None:
    settings = changed(plain, CASES["pissa"])
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


def test_new_rows_begin_as_the_mean_and_alone_are_trained(plain: Plain, tmp_path: Path) -> None:
    settings = changed(plain, {"model.new_tokens": WORDS})
    task = runs.assemble_alone(settings, tmp_path).loop.task
    tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
    base = AutoModelForCausalLM.from_pretrained(plain["model"]["name"], dtype=torch.float32)
    known = len(tokenizer)
    trained = {name: one for name, one in task.trainable().items() if ".lora_" not in name}
    assert len(trained) == 2
    for parameter, table in zip(trained.values(), (base.get_input_embeddings(), base.lm_head), strict=True):
        mean = table.weight.detach()[:known].mean(0)
        torch.testing.assert_close(parameter.detach().cpu(), torch.stack([mean, mean]))
