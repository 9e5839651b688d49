"""Adapters: the same from the same seed, saved and restored to the bit, readable by plain PEFT."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from finray import compat
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters
from finray.models.adapter_methods import AdapterMethod
from finray.models.artifacts import load_artifact, read_artifact
from finray.models.export import _scratch, export
from finray.models.loading import build_model
from finray.models.many_adapters import read_plain_lora
from finray.models.saved_layout import WEIGHTS, SavedLayout
from finray.pretrained.tokenizers import check_exists
from tests.support import tiny
from tests.support.adapted import lora

pytestmark = pytest.mark.long


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all_linear_layers_but_the_head_are_adapted() -> None:
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(lora())}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_peft_imports_no_bitsandbytes_unless_something_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take every worker more than a second at its start."""
    from peft import import_utils

    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    model = lora()
    assert "bitsandbytes" not in sys.modules
    assert type(model.get_base_model().model.layers[0].mlp.up_proj).__module__ == "peft.tuners.lora.layer"
    assert import_utils.is_bnb_available(), "others still find it"
    found = ModuleType("bitsandbytes")
    found.__spec__ = ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", found)
    with compat.without_bitsandbytes():
        assert import_utils.is_bnb_available()
    assert sys.modules["bitsandbytes"] is found


@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "pissa"])
def test_one_misspelt_target_among_right_ones_is_an_error_that_names_the_nearest(method: str) -> None:
    with pytest.raises(ModelError, match=r"this matches no module: `v_prj` \(did you mean `v_proj`\?\)") as caught:
        lora(target_modules=["q_proj", "v_prj"], method=method)
    assert caught.value.where == "adapter.target_modules"
    assert "`q_proj`: " not in str(caught.value)
    assert len(trained(lora(target_modules=["layers.0.self_attn.q_proj", "lm_head"]))) == 4


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "a/b/c", "missing.gguf"])
def test_models_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_exists(name)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        check_exists(str(tmp_path))


def test_an_export_that_reads_back_differently_is_not_kept(
    tiny_adapter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finray.models import export as module

    real = module.load_model

    def broken(model: ModelConfig, **options: Any) -> Any:
        loaded = real(model, **options)
        with torch.no_grad():
            loaded.lm_head.weight += 0.1 * torch.randn_like(loaded.lm_head.weight)
        return loaded

    monkeypatch.setattr(module, "load_model", broken)
    with pytest.raises(ModelError, match="the logits of the written model differ"):
        export(read_artifact(tiny_adapter_dir), tmp_path / "merged", merge=True, dtype="fp32")
    assert not (tmp_path / "merged").exists()


def test_modules_to_save_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"adapter\.modules_to_save: this matches no module: `lm_heed`") as caught:
        lora(modules_to_save=["embed_tokens", "lm_heed"])
    assert "lm_head" in str(caught.value)
    names = trained(lora(modules_to_save=["lm_head", "embed_tokens"]))
    assert len([name for name in names if ".lora_" not in name]) == 2
    # As PEFT itself writes it.
    assert lora().peft_config["default"].modules_to_save is None


def test_a_module_with_an_adapter_is_not_trained_in_full_as_well() -> None:
    with pytest.raises(ModelError, match="the adapter cannot be added") as caught:
        lora(target_modules=["q_proj"], modules_to_save=["_proj"])
    assert caught.value.where == "adapter.modules_to_save"


def test_modules_to_save_of_a_bf16_model_are_trained_in_fp32() -> None:
    model = tiny.build_model("llama").to(torch.bfloat16)
    saved = adapters.add_lora(model, AdapterConfig(rank=4, modules_to_save=["lm_head"]), seed=1)
    assert {parameter.dtype for parameter in trained(saved).values()} == {torch.float32}
    frozen = {one.dtype for one in saved.parameters() if not one.requires_grad}
    assert frozen == {torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["usual scale", "of a method of its own"])
def test_a_new_pissa_adapter_changes_nothing_while_it_is_trained(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is subtracted, without dropout; what is saved is twice as wide, at the same scale."""
    monkeypatch.setattr(adapters, "adapter_method", lambda name: AdapterMethod(options, is_pissa=name == "pissa"))
    model, tokens = lora(1, method="pissa"), torch.arange(3, 20)[None]
    expected = tiny.build_model("llama")(input_ids=tokens).logits
    torch.testing.assert_close(model.train()(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any("pissa_residual" in name for name in trained(model))
    SavedLayout(model).save_settings(tmp_path)
    saved = LoraConfig.from_pretrained(tmp_path)
    width = math.sqrt(saved.r) if options else saved.r
    assert saved.lora_alpha / width == pytest.approx(
        model.get_base_model().model.layers[0].mlp.up_proj.scaling["default"]
    )


def test_the_revision_of_the_base_is_written_beside_the_adapter(tmp_path: Path) -> None:
    for revision in (None, "v1"):
        model = adapters.add_lora(tiny.build_model("llama"), AdapterConfig(rank=4), seed=1, revision=revision)
        SavedLayout(model).save_settings(tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["revision"] == revision


def test_equal_runs_write_equal_settings(tmp_path: Path) -> None:
    """The order of a set of texts is another in each process."""
    SavedLayout(lora(modules_to_save=["norm", "lm_head"])).save_settings(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["lm_head", "norm"]
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert len(settings["target_modules"]) == 14


def test_an_activated_lora_is_refused(tmp_path: Path) -> None:
    """It acts only behind the tokens that invoke it, which nothing here looks for."""
    from peft import get_peft_model

    made = get_peft_model(tiny.build_model("llama"), LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]))
    made.save_pretrained(str(tmp_path), save_embedding_layers=False)
    with pytest.raises(ModelError, match="activated LoRA") as caught:
        adapters.load_adapter(tiny.build_model("llama"), tmp_path)
    assert caught.value.where == str(tmp_path)


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-export-one-12345678"
    left.mkdir()
    os.utime(left, (0, 0))
    with _scratch(tmp_path / "two") as mine:
        os.utime(mine, (0, 0))
        # Of an export that has not locked it yet.
        (begun := tmp_path / ".tmp-export-four-12345678").mkdir()
        with _scratch(tmp_path / "three") as other:
            # And what another one is at work on stays.
            assert sorted(tmp_path.iterdir()) == sorted([mine, other, begun])
            for folder in (mine, other):
                (folder / "tokenizer_config.json").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [begun.name, "three", "two"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_evaluated_in_the_arithmetic_that_it_was_trained_in(
    tiny_adapter_dir: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    """PEFT's forward pass rounds once more in bf16, which an evaluation after the training would show."""
    found = read_artifact(tiny_adapter_dir)
    assert found.base is not None
    start = AdapterConfig(start_from=str(tiny_adapter_dir))
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    cpu = torch.device("cpu")
    trained_model = build_model(
        found.base, start, precision=precision, attention_name=None, bits=None, seed=0, device=cpu
    ).eval()
    loaded = load_artifact(found, dtype=dtype)
    tokens = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        expected = trained_model(input_ids=tokens).logits
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
        for layer in loaded.modules():
            vars(layer).pop("forward", None)
        if dtype == torch.bfloat16:
            assert not torch.equal(loaded(input_ids=tokens).logits, expected), "PEFT's own"


# --- files that are none ----------------------------------------------------------------------------------------------


def settings_with(**changes: Any) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "m", **changes}).encode()


ODD = {
    **{f"settings {content!r}": ("adapter_config.json", content) for content in (b"", b"[]", b"null", b"\xff", b"{")},
    "rank null": ("adapter_config.json", settings_with(r=None, lora_alpha=None)),
    "rank text": ("adapter_config.json", settings_with(r="four")),
    "unknown kind": ("adapter_config.json", settings_with(peft_type="NEW")),
    "no kind": ("adapter_config.json", settings_with(peft_type=None)),
    "targets": ("adapter_config.json", settings_with(target_modules=5)),
    **{f"notes {content!r}": ("finray.json", content) for content in (b"", b"[]", b"\xff", b'{"new_tokens": 5}')},
    **{
        f"notes {content!r}": ("finray.json", content)
        for content in (
            b'{"problem": "single_label", "labels": 5}',
            b'{"problem": "odd"}',
            b'{"auto_class": "X"}',
            b'{"auto_class": "X", "task": "none of these"}',
            b'{"auto_class": []}',
            b'{"new_tokens": ["a", "a"]}',
            b'{"system": 5}',
            b'{"chat_template_arguments": [1]}',
        )
    },
    "weights cut off": (WEIGHTS, b"\x40\0\0\0\0\0\0\0{"),
    "weights empty": (WEIGHTS, b""),
}


@pytest.mark.parametrize(("name", "content"), ODD.values(), ids=ODD.keys())
def test_a_file_of_an_adapter_that_is_none_is_one_message(tiny_adapter_dir: Path, name: str, content: bytes) -> None:
    base = json.loads((tiny_adapter_dir / "adapter_config.json").read_text())["base_model_name_or_path"]
    (tiny_adapter_dir / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_artifact(read_artifact(tiny_adapter_dir, base=base), dtype=torch.float32)
    assert str(tiny_adapter_dir) in str(caught.value)
    assert caught.value.repair


def test_an_adapter_with_pickled_weights_alone_or_none_is_one_message(tiny_adapter_dir: Path) -> None:
    (tiny_adapter_dir / WEIGHTS).unlink()
    for content in (None, b"cbuiltins\nprint\n(Vran\ntR."):
        if content is not None:
            (tiny_adapter_dir / "adapter_model.bin").write_bytes(content)
        with pytest.raises(ModelError, match="the adapter cannot be loaded"):
            load_artifact(read_artifact(tiny_adapter_dir), dtype=torch.float32)


def test_an_adapter_without_a_base_is_one_message(tiny_adapter_dir: Path) -> None:
    (tiny_adapter_dir / "adapter_config.json").write_bytes(settings_with(base_model_name_or_path=None))
    with pytest.raises(ModelError, match="does not name its base model") as caught:
        read_artifact(tiny_adapter_dir)
    assert "--base" in str(caught.value.repair)


# --- tensors that are missing or left over: PEFT loads the others ---------------------------------------------------


def without_a_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if ".layers.1." not in name}


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("base_model.model.", "module.base_model.model."): one for name, one in tensors.items()}


def with_another_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {name.replace("q_proj", "qkv_proj"): one.clone() for name, one in tensors.items()}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without_a_layer, r"lacks .*layers\.1\..* and \d+ more"),
        (renamed, "lacks "),
        (with_another_layer, "does not take tensors of it: .*qkv_proj"),
    ],
)
def test_an_adapter_with_other_tensors_than_the_model_takes_is_no_answer_of_the_base(
    tiny_adapter_dir: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], what: str
) -> None:
    save_file(change(load_file(tiny_adapter_dir / WEIGHTS)), tiny_adapter_dir / WEIGHTS)
    with pytest.raises(ModelError, match=what) as caught:
        load_artifact(read_artifact(tiny_adapter_dir), dtype=torch.float32)
    assert str(tiny_adapter_dir) in str(caught.value)


def test_an_adapter_that_lacks_a_layer_is_not_served_beside_others(tiny_adapter_dir: Path) -> None:
    found = read_artifact(tiny_adapter_dir)
    assert found.base is not None
    assert len(read_plain_lora(tiny_adapter_dir, found.base).parts) == 14
    save_file(without_a_layer(load_file(tiny_adapter_dir / WEIGHTS)), tiny_adapter_dir / WEIGHTS)
    with pytest.raises(ModelError, match=r"lacks the tensors of model\.layers\.1\."):
        read_plain_lora(tiny_adapter_dir, found.base)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_hidden_layers": 1}, r"there is no model\.layers\.1\.mlp\.down_proj; "),
        ({"intermediate_size": 96}, r"model\.layers\.0\.mlp\.down_proj is 64 x 96 there, and has 128 inputs here; "),
        (
            {"num_key_value_heads": 1},
            r"model\.layers\.0\.self_attn\.k_proj is 16 x 64 there, and has 32 outputs here; ",
        ),
    ],
)
def test_an_adapter_of_another_base_is_refused_before_weights_are_loaded(
    tiny_adapter_dir: Path, sizes: dict[str, int], said: str, tmp_path: Path, tokenizer: Any
) -> None:
    tiny.save_model("llama", tmp_path / "other", tokenizer, **sizes)
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the adapter does not fit the model") as caught:
        load_artifact(read_artifact(tiny_adapter_dir, base=str(tmp_path / "other")), dtype=torch.float32)
    assert re.search(said, f"{caught.value.message}; ")
    assert "; it names " in str(caught.value.repair)


PEFTS = {
    "lora": {},
    "all names": {"target_modules": r".*\.0\..*(q_proj|o_proj)"},
    "dora": {"use_dora": True},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved norm and table": {"modules_to_save": ["norm", "embed_tokens"]},
    "target table": {"target_modules": ["embed_tokens", "q_proj"]},
    "target head": {"target_modules": ["lm_head", "q_proj"]},
    "new tokens": {"trainable_token_indices": [3, 5]},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "ranks": {"rank_pattern": {"q_proj": 2}},
    "classifier": {"task_type": "SEQ_CLS"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", PEFTS.values(), ids=PEFTS.keys())
def test_an_adapter_that_peft_made_is_loaded(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    from peft import get_peft_model

    def base() -> Any:
        if "task_type" in options:
            return tiny.build_classifier("llama", tie_word_embeddings=tied)
        return tiny.build_model("llama", tie_word_embeddings=tied)

    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **options})
    made = get_peft_model(base(), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(std=0.1)
    made.save_pretrained(str(tmp_path), save_embedding_layers="auto" if "trainable_token_indices" in options else tied)
    tokens = torch.arange(3, 20)[None]
    loaded = adapters.load_adapter(base(), tmp_path)
    torch.testing.assert_close(loaded(input_ids=tokens).logits, made.eval()(input_ids=tokens).logits)


SHARED = {
    "VBLoRA": {"num_vectors": 8, "vector_length": 16, "topk": 2},
    "TinyLora": {},
    "UniLora": {},
    "Vera": {"r": 4},
    "PromptTuning": {"num_virtual_tokens": 3},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SHARED)
def test_an_adapter_of_another_kind_of_pefts_answers_as_it_did_when_it_was_made(kind: str, tmp_path: Path) -> None:
    """Some keep one tensor for all layers, which PEFT lists under each, and some are no layers at all."""
    import peft

    targets = {} if kind == "PromptTuning" else {"target_modules": ["q_proj", "v_proj"]}
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **targets, **SHARED[kind])
    made = peft.get_peft_model(tiny.build_model("llama"), config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    made.save_pretrained(str(tmp_path))
    tokens = torch.arange(3, 20)[None]
    loaded = adapters.load_adapter(tiny.build_model("llama"), tmp_path)
    found = loaded(input_ids=tokens).logits
    torch.testing.assert_close(found, made.eval()(input_ids=tokens).logits)
    without = tiny.build_model("llama").eval()(input_ids=tokens).logits
    assert not torch.allclose(found[:, -1], without[:, -1])
