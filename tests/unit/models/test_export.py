"""Exported models: what stands beside the weights, and what is left where something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.models import export as module
from finray.models.artifacts import load_artifact, merge_adapter, read_artifact
from finray.models.export import Exported, convert_gguf, export
from finray.pretrained.tokenizers import load_tokenizer
from tests.support import tiny


@pytest.fixture
def adapter(tiny_adapter_dir: Path, tiny_model_dir: Path) -> Path:
    """An adapter that changes its base, with finray's notes."""
    notes = {"rows": "chat", "base_model": str(tiny_model_dir), "other": 1}
    (tiny_adapter_dir / "finray.json").write_text(json.dumps(notes))
    return tiny_adapter_dir


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_merged_model_says_of_where_it_comes_from(adapter: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    exported = export(read_artifact(adapter), tmp_path / "deep" / "merged", merge=True, dtype="fp32")
    said = json.loads((exported.folder / "finray.json").read_text())
    assert said.pop("difference_from_training") == exported.difference < 1e-4
    assert said == {
        "rows": "chat",
        "merged_onto": str(tiny_model_dir),
        "revision": None,
        "trained_on": "full precision",
    }
    assert exported == Exported(
        tmp_path / "deep" / "merged", True, "fp32", exported.difference, str(tiny_model_dir), None, None
    )
    assert names(tmp_path / "deep") == {"merged"}
    # A server may run as somebody else.
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in exported.folder.iterdir()}
    assert modes[".safetensors"] == modes[".json"]
    assert read_artifact(exported.folder).is_adapter is False


@pytest.mark.parametrize("stored", ["4bit", "8bit"])
def test_without_bitsandbytes_a_merged_model_says_on_what_it_was_trained_and_not_how_far_it_is_from_it(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    notes = json.loads((adapter / "finray.json").read_text())
    (adapter / "finray.json").write_text(json.dumps({**notes, "quantization": stored}))
    monkeypatch.setattr(module, "load_as_trained", pytest.fail)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    exported = export(read_artifact(adapter), tmp_path / "out", merge=True, dtype="fp32")
    said = json.loads((tmp_path / "out" / "finray.json").read_text())
    assert exported.trained_on == said["trained_on"] == stored
    assert (exported.rounding, said["difference_from_training"]) == (None, exported.difference)


def test_an_adapter_names_the_base_that_was_said(adapter: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    exported = export(read_artifact(adapter, base=str(moved)), tmp_path / "out", merge=False, dtype="bf16")
    assert (exported.merged, exported.dtype, exported.onto) == (False, "fp32", None)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(moved)
    assert json.loads((tmp_path / "out" / "finray.json").read_text()) == {
        "rows": "chat",
        "base_model": str(moved),
        "other": 1,
    }
    weights = "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (adapter / weights).read_bytes()
    assert "tokenizer.json" in names(tmp_path / "out")


@pytest.mark.parametrize(("name", "dtype", "most"), [("bf16", torch.bfloat16, 5e-2), ("fp16", torch.float16, 1e-2)])
def test_a_whole_model_is_written_in_the_dtype_that_was_asked_for(
    tiny_model_dir: Path, tmp_path: Path, name: str, dtype: torch.dtype, most: float
) -> None:
    from transformers import AutoModelForCausalLM

    exported = export(read_artifact(tiny_model_dir), tmp_path / "out", merge=True, dtype=name)
    assert (exported.merged, exported.dtype, exported.onto) == (True, name, None)
    assert 0 < exported.difference < most
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert written.dtype == dtype
    whole = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).state_dict()
    for key, weight in written.state_dict().items():
        assert torch.equal(weight, whole[key].to(dtype)), key
    assert "finray.json" not in names(tmp_path / "out")


def test_a_model_that_was_trained_whole_says_what_it_was_trained_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    shutil.copytree(tiny_model_dir, trained)
    notes = {"task": "causal_lm", "system": "Answer in French.", "rows": "chat", "base_model": str(tiny_model_dir)}
    (trained / "finray.json").write_text(json.dumps(notes))
    exported = export(read_artifact(trained), tmp_path / "out", merge=True, dtype="fp32")
    del notes["base_model"]
    assert json.loads((exported.folder / "finray.json").read_text()) == notes


def test_weights_that_fp16_cannot_hold_are_refused_and_bf16_holds_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        # Of a token that the text of the comparison does not have.
        model.model.embed_tokens.weight[2] = 1e5
    shutil.copytree(tiny_model_dir, tmp_path / "large")
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(ModelError, match=r"(?s)embed_tokens.weight holds 1e\+05, .* fp16 .* 6.55e\+04.*--dtype bf16"):
        export(read_artifact(tmp_path / "large"), tmp_path / "out", merge=True, dtype="fp16")
    assert not (tmp_path / "out").exists()
    assert export(read_artifact(tmp_path / "large"), tmp_path / "out", merge=True, dtype="bf16").merged


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT, of its own merging
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_an_adapter_on_one_of_two_tied_tables_is_merged_into_that_one(
    targets: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tiny.save_model("llama", tmp_path / "base", tokenizer, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(3)
    tuned = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "tuned", save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path / "tuned")
    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        expected = tuned(input_ids=tokens).logits
        assert not torch.allclose(expected, tuned.get_base_model()(input_ids=tokens + 1).logits, atol=0.1)
        merged = merge_adapter(load_artifact(read_artifact(tmp_path / "tuned"), dtype=torch.float32))
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
        folder = export(read_artifact(tmp_path / "tuned"), tmp_path / "out", merge=True, dtype="fp32").folder
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(again(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    # One table, where neither has an adapter.
    assert again.config.tie_word_embeddings is merged.config.tie_word_embeddings is (targets == ["q_proj"])
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is (targets == ["q_proj"])


def test_a_merge_that_runs_out_of_memory_is_not_pefts_fault(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, error = load_artifact(read_artifact(adapter), dtype=torch.float32), torch.OutOfMemoryError("CUDA")

    def fails(**_: Any) -> Any:
        raise error

    monkeypatch.setattr(model, "merge_and_unload", fails)
    with pytest.raises(torch.OutOfMemoryError):
        merge_adapter(model)
    error = RuntimeError("no bias")
    with pytest.raises(ModelError, match="PEFT cannot merge the adapter: no bias"):
        merge_adapter(model)


def test_the_working_directory_is_not_replaced_by_an_export(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path(), tmp_path / "here"):
        with pytest.raises(ModelError, match="is the working directory"):
            export(read_artifact(adapter), output, merge=False, dtype="fp32")
    assert not names(tmp_path / "here")


def test_weights_in_several_files_are_the_same_model(adapter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, cut = (
        export(read_artifact(adapter), tmp_path / str(size), merge=True, dtype="fp32", max_shard_size=size).folder
        for size in (None, "100KB")
    )
    files = sorted(cut.glob("model-*.safetensors"))
    assert len(files) > 2
    # One tensor alone may be larger; here none is but the embedding.
    assert sum(one.stat().st_size > 102_000 for one in files) <= 1
    assert "model.safetensors.index.json" in names(cut)
    assert "model.safetensors.index.json" not in names(whole)
    left, right = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, cut))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("size", ["5", "5 GB", "0GB", "-1GB", "1e3MB", "5gb", ""])
def test_a_size_that_is_none_is_refused_before_anything_is_loaded(
    size: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_artifact", pytest.fail)
    with pytest.raises(ModelError, match="not a file size"):
        export(read_artifact(adapter), tmp_path / "out", merge=True, dtype="fp32", max_shard_size=size)
    with pytest.raises(ModelError, match="an adapter is one file"):
        export(read_artifact(adapter), tmp_path / "out", merge=False, dtype="fp32", max_shard_size="5GB")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_an_error_that_says_where_and_leaves_nothing(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    before = names(tmp_path)
    with pytest.raises(ModelError, match="cannot be written: No space left") as caught:
        export(read_artifact(adapter), tmp_path / "out", merge=False, dtype="fp32")
    assert caught.value.where == str(tmp_path / "out")
    assert names(tmp_path) == before


def test_a_file_in_the_way_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        export(read_artifact(adapter), tmp_path / "out", merge=True, dtype="fp32")
    with pytest.raises(ModelError, match="already exists"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="fp32")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_gguf_file_is_written_as_an_ordinary_model(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading itself is Transformers', and tested where the package gguf is installed."""
    asked: list[Any] = []

    def load(model: Any, **options: Any) -> Any:
        asked.append((model.name, options))
        return real(ModelConfig(name=str(tiny_model_dir)), **options)

    (tmp_path / "x.gguf").touch()
    real = module.load_model
    monkeypatch.setattr(module, "load_model", load)
    monkeypatch.setattr(module, "load_tokenizer", lambda model: load_tokenizer(ModelConfig(name=str(tiny_model_dir))))
    monkeypatch.setattr("finray.errors.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="bf16")
    assert names(tmp_path) == {"x.gguf"}
    monkeypatch.setattr("finray.errors.find_spec", lambda name: name)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="bf16")
    assert asked == [(str(tmp_path / "x.gguf"), {"dtype": torch.bfloat16})]
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= names(tmp_path / "out")
    assert names(tmp_path) == {"out", "x.gguf"}
