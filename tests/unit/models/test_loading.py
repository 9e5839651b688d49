"""Models from GGUF files, with code of their own, and from a revision of the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models.loading import load_model
from finray.models.sharded import materialise
from finray.pretrained.tokenizers import load_tokenizer
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


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code of its own."""
    folder = tmp_path / "own"
    tiny.build_model("llama").save_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text())
    parts = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": parts}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    # Transformers copies the code there.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return folder


@pytest.mark.parametrize("on_meta", [False, True])
def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(own: Path, on_meta: bool) -> None:
    with pytest.raises(ModelError, match="contains custom code") as caught:
        load_model(ModelConfig(name=str(own)), dtype=torch.float32, on_meta=on_meta)
    assert "set model.trust_remote_code to true" in str(caught.value.repair)
    trusted = ModelConfig(name=str(own), trust_remote_code=True)
    assert type(load_model(trusted, dtype=torch.float32, on_meta=on_meta)).__name__ == "OwnModel"


@pytest.fixture
def hub(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model of the Hub in the cache, by branch: its head has another value and its tokenizer another template."""
    place = tmp_path / "hub" / "models--org--tiny"
    (place / "refs").mkdir(parents=True)
    models = {}
    for number, branch in enumerate(("main", "v1")):
        snapshot = place / "snapshots" / (str(number) * 40)
        models[branch] = tiny.build_model("llama", seed=number)
        models[branch].save_pretrained(str(snapshot))
        tokenizer.save_pretrained(str(snapshot))
        (snapshot / "chat_template.jinja").write_text(f"{branch}{{{{ messages }}}}")
        (place / "refs" / branch).write_text(str(number) * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return models


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_revision_is_that_of_weights_config_and_tokenizer(hub: dict[str, Any], revision: str | None) -> None:
    asked = ModelConfig(name="org/tiny", revision=revision)
    expected = hub[revision or "main"].lm_head.weight
    assert torch.equal(load_model(asked, dtype=torch.float32).lm_head.weight, expected)
    # What is sharded is read from the files, a row at a time.
    sharded = load_model(asked, dtype=torch.float32, on_meta=True)
    materialise(sharded, asked, AdapterConfig(method="none"), device=torch.device("cpu"), seed=1)
    assert torch.equal(sharded.lm_head.weight, expected)
    assert load_tokenizer(asked).chat_template.startswith(revision or "main")
