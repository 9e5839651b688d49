"""Blueprints: the counts of a run's header, and the shapes of every family, from a configuration alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models.loading import build_model
from finray.planning.blueprint import Blueprint, build_blueprint, model_shape
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny

# Width of input and output to count: queries and outputs, keys and values, gate and up, down.
OTHERS = {(64, 64): 4, (64, 32): 4, (64, 128): 4, (128, 64): 2}
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "gemma2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        tiny.save_model(family, folder, tokenizer)
    return found


def blueprint(folder: Path, **fields: Any) -> Blueprint:
    return build_blueprint(ModelConfig(name=str(folder)), AdapterConfig(**fields))


def header_counts(folder: Path, **fields: Any) -> tuple[int, int]:
    """(trainable, all) as training counts them, on real weights."""
    model = ModelConfig(name=str(folder))
    adapter, device = AdapterConfig(**fields), torch.device("cpu")
    built = build_model(model, adapter, precision="fp32", attention_name=None, bits=None, seed=1, device=device)
    return CausalLM(built, precision="fp32", attention_name=None, device=device).parameter_counts()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "adapter",
    [{"rank": 5}, {"rank": 3, "target_modules": r".*\.1\..*(q_proj|c_attn)"}, {"method": "none"}],
    ids=["all-linear", "expression", "full"],
)
def test_counts_are_those_of_the_header(folders: dict[str, Path], family: str, adapter: dict[str, Any]) -> None:
    drawn = blueprint(folders[family], **adapter)
    assert (drawn.trainable, drawn.parameters) == header_counts(folders[family], **adapter)


def test_another_rank_would_be_seen(folders: dict[str, Path]) -> None:
    assert blueprint(folders["llama"], rank=6).trainable != header_counts(folders["llama"], rank=5)[0]


def test_of_a_model_that_reads_images_the_text_part_is_counted(tmp_path: Path, tokenizer: Any) -> None:
    tiny.save_reader("mistral3", tmp_path, tokenizer)
    whole, of_text = tiny.build_reader("mistral3"), tiny.build_model("mistral", tie_word_embeddings=True)
    text = sum(weight.numel() for weight in of_text.parameters())
    drawn = blueprint(tmp_path, method="none")
    assert (drawn.trainable, drawn.kept) == (text, sum(weight.numel() for weight in whole.parameters()) - text)
    assert drawn.parts == ("model.vision_tower", "model.multi_modal_projector")
    assert {(linear.inputs, linear.outputs): count for linear, count in drawn.linears} == OTHERS
    adapted = blueprint(tmp_path, rank=3)
    assert (adapted.trainable, adapted.parameters) == header_counts(tmp_path, rank=3)
    # Of the matrices of the text part and of no other.
    assert adapted.adapter == 3 * sum((inputs + outputs) * count for (inputs, outputs), count in OTHERS.items())


def test_no_weights_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama"] / "config.json", tmp_path)
    assert blueprint(tmp_path, rank=4) == blueprint(folders["llama"], rank=4)
    shape = model_shape(ModelConfig(name=str(tmp_path)), AdapterConfig(), packs=True)
    assert {tensor.device.type for tensor in shape.model.parameters()} == {"meta"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_is_counted_but_the_head(folders: dict[str, Path], family: str) -> None:
    drawn = blueprint(folders[family], rank=4)
    # By hand: two layers of four query heads of width 16 and two key heads; GPT-2 joins queries, keys and values.
    expected = {(64, 192): 2, (64, 64): 2, (64, 256): 2, (256, 64): 2} if family == "gpt2" else OTHERS
    assert {(linear.inputs, linear.outputs): count for linear, count in drawn.linears} == expected
    assert drawn.adapter == sum(4 * (linear.inputs + linear.outputs) * count for linear, count in drawn.linears)
    assert (drawn.layers, drawn.query) == (2, 64)
    assert drawn.learned_positions == (family == "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_can_be_thought_of(folders: dict[str, Path], family: str) -> None:
    full = model_shape(ModelConfig(name=str(folders[family])), AdapterConfig(method="none"), packs=True)
    assert full.with_lora(7).blueprint == blueprint(folders[family], rank=7)
    assert full.blueprint.adapter == 0


def test_layers_add_up_to_the_model(folders: dict[str, Path]) -> None:
    drawn = blueprint(folders["llama"], rank=4)
    assert drawn.base == 2 * drawn.layer + drawn.embedding + drawn.hidden + (0 if drawn.tied else drawn.head)


def test_a_configuration_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="configuration cannot be loaded"):
        blueprint(tmp_path)


def test_a_gguf_file_is_known_by_its_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(384)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    drawn = blueprint(tmp_path / "model.gguf", rank=4)
    assert (drawn.context, drawn.vocabulary, drawn.layers, drawn.query) == (512, 384, 2, 64)
    # By hand: queries and outputs, keys and values, feed-forward, two norms.
    assert drawn.layer == 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
