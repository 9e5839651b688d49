"""Models from GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from finray.config.schema import ModelConfig
from finray.models.loading import load_model
from tests.support import tiny


def test_a_model_from_a_gguf_file_is_saved_as_an_ordinary_one(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = tiny.build_model("llama", num_key_value_heads=4)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(384)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_model(ModelConfig(name=str(tmp_path / "model.gguf")), dtype=torch.float32)
    loaded.save_pretrained(str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert getattr(again.config, "quantization_config", None) is None
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight)
