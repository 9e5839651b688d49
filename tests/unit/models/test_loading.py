"""Models from GGUF files, with their own code, from a revision of the Hub, and from files that lack weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finray.config.resolved import LabelSet
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters
from finray.models.loading import build_model, check_loading, load_model, require_sensible
from finray.models.sharded import left_out, materialize
from finray.pretrained.tokenizers import load_tokenizer
from finray.pretrained.weights import stored_weights
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
    return tiny.in_hub_cache(tmp_path / "hub", tokenizer, monkeypatch)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_revision_is_that_of_weights_config_and_tokenizer(hub: dict[str, Any], revision: str | None) -> None:
    asked = ModelConfig(name="org/tiny", revision=revision)
    expected = hub[revision or "main"].lm_head.weight
    assert torch.equal(load_model(asked, dtype=torch.float32).lm_head.weight, expected)
    # What is sharded is read from the files, a row at a time.
    sharded = load_model(asked, dtype=torch.float32, on_meta=True)
    materialize(sharded, asked, AdapterConfig(method="none"), device=torch.device("cpu"), seed=1)
    assert torch.equal(sharded.lm_head.weight, expected)
    assert load_tokenizer(asked).chat_template.startswith(revision or "main")


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_revision_is_that_of_the_generation_settings_and_of_a_new_adapter(
    hub: dict[str, Any], revision: str | None, tmp_path: Path
) -> None:
    (file,) = (tmp_path / "hub").rglob(f"{'1' * 40}/generation_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.3}))
    asked = ModelConfig(name="org/tiny", revision=revision)
    model = build_model(
        *(asked, AdapterConfig(rank=4)),
        **{"precision": "fp32", "attention_name": None, "bits": None, "seed": 0, "device": torch.device("cpu")},
        on_meta=True,
    )
    assert model.peft_config["default"].revision == revision
    penalty = model.get_base_model().generation_config.repetition_penalty
    assert (penalty == 1.3) is (revision == "v1")


def test_offloaded_weights_are_in_cpu_memory_and_buffers_on_the_device(hub: dict[str, Any]) -> None:
    """As FSDP2 wants them: it gathers weights on the device, and leaves buffers where they are."""
    asked, meta = ModelConfig(name="org/tiny"), torch.device("meta")
    model = load_model(asked, dtype=torch.float32, on_meta=True)
    options = {"device": meta, "parameter_device": torch.device("cpu"), "seed": 1}
    materialize(model, asked, AdapterConfig(method="none"), **options)
    assert torch.equal(model.lm_head.weight, hub["main"].lm_head.weight)
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    assert {one.device.type for one in model.buffers()} == {"meta"}


@pytest.mark.parametrize("sizes", [{"num_labels": 10**9}, {"num_hidden_layers": 10**9, "id2label": {"0": "a"}}])
def test_impossible_sizes_of_a_model_of_the_hub_are_found_before_anything_is_built(
    hub: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    for file in (tmp_path / "hub").rglob("config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    for load in (load_tokenizer, lambda model: load_model(model, dtype=torch.float32)):
        with pytest.raises(ModelError, match=f"`{next(iter(sizes))}` is 1000000000; .*") as caught:
            load(ModelConfig(name="org/tiny"))
        assert caught.value.where == "model.name=org/tiny"


def test_impossible_sizes_of_a_gguf_file_are_found_before_anything_is_built(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_block_count(10**9)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ModelError, match="`num_hidden_layers` is 1000000000"):
        load_model(ModelConfig(name=str(tmp_path / "model.gguf")), dtype=torch.float32, on_meta=True)


# --- weights that the files do not have -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    tiny.save_model("llama", tmp_path / "model", tokenizer)
    return tmp_path / "model"


def configure(folder: Path, **changes: object) -> ModelConfig:
    """Another config.json beside the same weights."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return ModelConfig(name=str(folder))


def filled_later(model: ModelConfig) -> None:
    """Build on no device, and fill from the files."""
    adapter, cpu = AdapterConfig(rank=4), torch.device("cpu")
    options: dict[str, Any] = {"precision": "fp32", "attention_name": None, "bits": None, "seed": 0, "device": cpu}
    materialize(build_model(model, adapter, on_meta=True, **options), model, adapter, device=cpu, seed=0)


BERT = {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 4}, r"random: model\.layers\.2\..*, .* and 15 more"),
        ({"attention_bias": True}, r"random: model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"mlp_bias": True, "num_hidden_layers": 1}, r"down_proj\.bias, .*gate_proj\.bias, .*up_proj\.bias(?! and)"),
        (BERT, r"random: bert\."),
        ({"vocab_size": 300}, r"different shape .* lm_head\.weight \(\(384, 64\), not \(300, 64\)\)"),
    ],
    ids=["layers", "biases", "three biases", "another architecture", "vocabulary"],
)
def test_weights_that_the_files_lack_are_an_error_that_names_them(
    folder: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        load_model(configure(folder, **changes), dtype=torch.float32)
    assert str(folder) in str(caught.value)


def test_files_can_be_checked_without_reading_weights(folder: Path) -> None:
    check_loading(ModelConfig(name=str(folder)))
    with pytest.raises(ModelError, match=r"random: model\.layers\.2\..*, .* and 15 more"):
        check_loading(configure(folder, num_hidden_layers=4))
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        check_loading(configure(folder, model_type="none of these"))
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="is damaged"):
        check_loading(ModelConfig(name=str(folder)))


@pytest.mark.parametrize(("method", "dtypes"), [("none", {torch.float32}), ("lora", {torch.bfloat16, torch.float32})])
def test_frozen_weights_are_kept_in_the_precision_of_the_passes_and_trained_ones_as_they_are_asked_for(
    folder: Path, method: Any, dtypes: set[torch.dtype]
) -> None:
    model = build_model(
        *(ModelConfig(name=str(folder)), AdapterConfig(method=method, rank=4)),
        **{"precision": "bf16", "attention_name": None, "bits": None, "seed": 0, "device": torch.device("cpu")},
    )
    assert {one.dtype for one in model.parameters()} == dtypes
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    # Keys and values of earlier tokens are of no use in training.
    assert model.config.use_cache is False


def test_a_sharded_model_is_not_filled_up_at_random_either(folder: Path) -> None:
    with pytest.raises(ModelError, match="would be random"):
        filled_later(configure(folder, num_hidden_layers=3))


def test_layers_in_the_files_that_the_model_has_not_are_told(folder: Path) -> None:
    stored = stored_weights(folder)
    assert stored is not None
    for layers, expected in ((2, []), (1, [name for name in sorted(stored.tensors) if ".layers.1." in name])):
        model = load_model(configure(folder, num_hidden_layers=layers), dtype=torch.float32)
        assert left_out(model, stored) == expected
        wrapped = adapters.add_lora(model, AdapterConfig(rank=4, modules_to_save=["lm_head"]), seed=0)
        assert left_out(wrapped, stored) == expected


ROPE = {"rope_type": "default", "rope_theta": float("nan")}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_dropout": 2.0}, "`attention_dropout` is 2, and a probability is from 0 to 1"),
        ({"attention_dropout": float("nan")}, "`attention_dropout` is not a number"),
        ({"attention_dropout": -0.1}, "`attention_dropout` is -0.1"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is not a number"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps` is -1"),
        ({"rope_parameters": ROPE}, "`rope_parameters.rope_theta` is not a number"),
        ({"rope_parameters": ROPE | {"rope_theta": 0.0}}, "`rope_parameters.rope_theta` is 0"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3, which does not divide `num_attention_heads`, 4"),
    ],
)
def test_values_that_only_a_forward_pass_would_refuse_are_found_with_their_key(
    folder: Path, changes: dict[str, object], named: str
) -> None:
    model = configure(folder, **changes)
    with pytest.raises(ModelError, match="cannot compute with its configuration") as caught:
        load_model(model, dtype=torch.float32, on_meta=True)
    assert named in caught.value.message


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.ENCODERS])
def test_the_values_of_usual_models_are_sensible(family: str) -> None:
    is_encoder = family in tiny.ENCODERS
    require_sensible(tiny.build_classifier(family) if is_encoder else tiny.build_model(family), ModelConfig(name="m"))


def rewrite(folder: Path, changes: dict[str, torch.Tensor]) -> ModelConfig:
    """Other tensors in the model's file."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelConfig(name=str(folder))


PROJECTION = "model.layers.1.mlp.up_proj"
CODES = {
    "int8": (torch.zeros(128, 64, dtype=torch.int8), "I8"),
    "fp8": (torch.zeros(128, 64).to(torch.float8_e4m3fn), "F8_E4M3"),
    "4 bits": (torch.zeros(128 * 64 // 2, 1, dtype=torch.uint8), "U8"),
}


@pytest.mark.parametrize("kind", CODES)
def test_weights_that_are_no_numbers_by_themselves_are_refused(folder: Path, kind: str) -> None:
    tensor, dtype = CODES[kind]
    model = rewrite(folder, {f"{PROJECTION}.weight": tensor})
    named = rf"no floating-point number: {PROJECTION}\.weight \({dtype}\)"
    with pytest.raises(ModelError, match=named):
        check_loading(model)
    with pytest.raises(ModelError, match=named):
        load_model(model, dtype=torch.float32)
    with pytest.raises(ModelError, match=named):
        filled_later(model)


@pytest.mark.parametrize(
    "name",
    [
        *("SCB", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "weight_format"),
        *("weight_scale", "weight_scale_inv", "input_scale", "weight_scale_2", "weight_zero_point", "weight_packed"),
        *("qweight", "qzeros", "scales", "g_idx", "weight.nested_absmax"),
    ],
)
def test_scales_beside_weights_are_refused(folder: Path, name: str) -> None:
    model = rewrite(folder, {f"{PROJECTION}.{name}": torch.ones(128)})
    with pytest.raises(ModelError, match=f"scales of quantized weights: {PROJECTION}.{name};"):
        check_loading(model)
    with pytest.raises(ModelError, match="scales of quantized weights"):
        filled_later(model)


def test_other_tensors_that_the_model_does_not_have_are_returned_and_old_masks_are_no_weights(folder: Path) -> None:
    assert check_loading(ModelConfig(name=str(folder))) == []
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    more = {"model.layers.0.self_attn.bias": mask, "model.logit_scale": torch.ones(1), "vision.proj": torch.ones(2, 2)}
    assert check_loading(rewrite(folder, more)) == sorted(more)


@pytest.mark.parametrize("content", [b"[]", b"{", b"null", b"\xff", b'{"model_type": 5}', b'{"model_type": null}'])
@pytest.mark.parametrize("on_meta", [True, False])
def test_a_config_json_that_is_none_is_one_message(folder: Path, content: bytes, on_meta: bool) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"(cannot be loaded|config\.json: has invalid content)") as caught:
        load_model(ModelConfig(name=str(folder)), dtype=torch.float32, on_meta=on_meta)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "cause", "repair"),
    [
        ({"hidden_act": "nope"}, "KeyError: 'nope'", "look at what its `config.json` says"),
        ({"model_type": "t5"}, "T5Config", "a model of another type"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads", "look at what"),
    ],
)
def test_what_transformers_says_of_a_config_is_named_and_no_file_is_called_damaged(
    folder: Path, changes: dict[str, Any], cause: str, repair: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(configure(folder, **changes), dtype=torch.float32, on_meta=True)
    assert caught.value.where == f"model.name={folder}"
    assert cause in caught.value.message
    assert repair in str(caught.value.repair)
    assert "damaged" not in str(caught.value)


def test_an_index_that_points_out_of_the_directory_is_not_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    names = load_file(folder.parent / "other.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its directory"):
        load_model(ModelConfig(name=str(folder)), dtype=torch.float32)


@pytest.mark.parametrize("bits", [None, 4])
def test_what_ends_a_turn_is_read_from_the_generation_config_however_the_model_is_built(
    folder: Path, tmp_path: Path, bits: int | None
) -> None:
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"eos_token_id": [2, 5], "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    adapter = AdapterConfig(method="none" if bits is None else "lora")
    options: dict[str, Any] = {"precision": "fp32", "attention_name": None, "bits": bits, "seed": 0}
    model = build_model(
        ModelConfig(name=str(folder)), adapter, device=torch.device("cpu"), on_meta=bits is None, **options
    )
    model = model if bits is None else model.get_base_model()
    assert (model.generation_config.eos_token_id, model.generation_config.repetition_penalty) == ([2, 5], 1.3)
    # A model without the file has what its configuration says.
    (folder / "generation_config.json").unlink()
    plain = load_model(ModelConfig(name=str(folder)), dtype=torch.float32, on_meta=True)
    assert plain.generation_config.eos_token_id == plain.config.eos_token_id


def test_what_is_sharded_is_built_with_plain_layers_where_the_files_are_quantized(folder: Path) -> None:
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = load_model(configure(folder, quantization_config=quantized), dtype=torch.float32, on_meta=True)
    assert not hasattr(model.config, "quantization_config")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


# --- built on no device, and loaded after that ------------------------------------------------------------------------


def both(model: ModelConfig, adapter: AdapterConfig, **options: Any) -> tuple[Any, Any, bool]:
    """A model that is loaded at once, one that is filled later, and whether all of it was read for that."""
    options = {"precision": "fp32", "attention_name": None, "bits": None, "seed": 3, **options}
    cpu = torch.device("cpu")
    whole, sharded = (build_model(model, adapter, device=cpu, on_meta=meta, **options) for meta in (False, True))
    return whole, sharded, materialize(sharded, model, adapter, device=cpu, seed=options["seed"])


def assert_equal(whole: Any, sharded: Any) -> None:
    expected, found = dict(whole.named_parameters()), dict(sharded.named_parameters())
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["lora", "none"])
def test_rows_of_new_words_are_the_mean_of_the_known_ones_however_the_model_is_loaded(
    method: Any, tied: bool, tmp_path: Path, tokenizer: Any
) -> None:
    # Other weights have rows of these numbers too.
    tiny.save_model("llama", tmp_path, tokenizer, tie_word_embeddings=tied, intermediate_size=512)
    model = ModelConfig(name=str(tmp_path), new_tokens=["<one>", "<two>", "<three>"])
    whole, sharded, is_read = both(model, AdapterConfig(method=method, rank=4))
    assert not is_read
    assert_equal(whole, sharded)
    stored, known = load_file(tmp_path / "model.safetensors"), len(tokenizer)
    for name in ("model.embed_tokens.weight",) if tied else ("model.embed_tokens.weight", "lm_head.weight"):
        mean = stored[name][:known].mean(0).expand(3, -1)
        inner = sharded.get_base_model() if method == "lora" else sharded
        layer = inner.get_submodule(name.removesuffix(".weight"))
        rows = layer.token_adapter.trainable_tokens_delta["default"] if method == "lora" else layer.weight[known:][:3]
        torch.testing.assert_close(rows.detach(), mean)
        assert rows.requires_grad


@pytest.mark.parametrize("labels", [None, LabelSet("multi_label", ("low", "middle", "high"))])
def test_a_model_whose_files_name_its_weights_otherwise_is_read_whole(
    labels: LabelSet | None, tmp_path: Path, tokenizer: Any
) -> None:
    """Transformers joins experts as it loads them; a head that is in no file is drawn from the seed here too."""
    tiny.save_model("qwen3_moe", tmp_path, tokenizer)
    model = ModelConfig(name=str(tmp_path), task="causal_lm" if labels is None else "sequence_classification")
    whole, sharded, is_read = both(model, AdapterConfig(method="none"), labels=labels)
    assert is_read
    assert_equal(whole, sharded)
    if labels is not None:
        assert sharded.score.weight.shape == (3, 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_modules_that_are_trained_whole_are_not_packed_with_the_rest(folder: Path, bits: int) -> None:
    model, cpu = ModelConfig(name=str(folder)), torch.device("cpu")
    adapter = AdapterConfig(rank=4, target_modules=["q_proj"], modules_to_save=["layers.1.mlp.down_proj"])
    options: dict[str, Any] = {"precision": "bf16", "attention_name": None, "bits": bits, "seed": 3, "device": cpu}
    made = build_model(model, adapter, **options)
    assert all(one.is_meta for one in made.parameters())
    materialize(made, model, adapter, device=cpu, seed=3)
    layers = made.get_base_model().model.layers
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    trained = layers[1].mlp.down_proj.modules_to_save["default"].weight
    assert torch.equal(trained, stored)
    assert trained.requires_grad
    # What is packed takes half a byte or one for each weight.
    packed = layers[0].mlp.down_proj.weight
    assert packed.numel() * packed.element_size() * 8 == stored.numel() * bits
