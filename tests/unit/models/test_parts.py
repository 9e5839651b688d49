"""Small parts of models, each against what is written out here: names, sizes, layouts, packed layers, kernels."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters, attention, vocabulary
from finray.models.attention import packed_attention
from finray.models.classifier import mark_new, modules_to_save, new_values, set_padding
from finray.models.packing_check import check_packing_of
from finray.models.quantized import QuantizedLinear, quantize_layers
from finray.models.saved_layout import WEIGHTS, SavedLayout
from finray.pretrained.tokenizers import NewTokens
from finray.pretrained.weights import stored_weights
from tests.support import tiny

# --- names and places of weights --------------------------------------------------------------------------------------


ROWS = torch.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize("ids", [(6, 7), (4, 5), (5, 6, 7), (8, 9)])
def test_rows_of_a_table_with_those_of_new_words(tmp_path: Path, ids: tuple[int, ...]) -> None:
    """Files have six rows, of which the tokenizer knew so many, or more: a new row is their mean."""
    save_file({"table": ROWS}, tmp_path / "model.safetensors")
    stored = stored_weights(tmp_path)
    assert stored is not None
    added = NewTokens(ids, known=ids[0])
    height = max(6, max(ids) + 1)
    whole = torch.cat([ROWS, torch.zeros(height - 6, 2)])
    whole[[*ids, *range(6, height)]] = ROWS[: ids[0]].mean(0)
    for start, stop in ((0, None), (0, 3), (3, 6), (2, height), (5, height), (height - 1, height), (1, None)):
        found = vocabulary.read_with_new_rows(stored, "table", start, stop, added)
        assert torch.equal(found, whole[start:stop])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [2, 20])
def test_a_model_is_widened_by_what_it_lacks(tied: bool, rows: int) -> None:
    model = tiny.build_model("llama", tie_word_embeddings=tied)
    known = 370
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    vocabulary.widen(model, NewTokens(tuple(range(known, known + rows)), known=known))
    assert torch.equal(torch.rand(1), expected), "random state was used up"
    tables = [model.get_input_embeddings().weight, model.lm_head.weight]
    for name, table in zip(("model.embed_tokens.weight", "lm_head.weight"), tables, strict=True):
        old = before.get(name, before["model.embed_tokens.weight"])
        assert len(table) == max(384, known + rows)
        assert torch.equal(table[:known], old[:known])
        mean = old[:known].mean(0)
        torch.testing.assert_close(table[known : known + rows].detach(), mean.expand(rows, -1))
        assert torch.equal(table[known + rows : 384], old[known + rows :])
    assert (tables[0] is tables[1]) is tied


def test_weights_of_another_model_or_adapter_are_refused_with_a_name(tmp_path: Path) -> None:
    def lora(**fields: Any) -> Any:
        return adapters.add_lora(tiny.build_model("llama"), AdapterConfig(**{"rank": 4, **fields}), seed=1)

    save_file({name: one.contiguous() for name, one in SavedLayout(lora()).tensors().items()}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"has shape \(4, 64\), but the model expects \(8, 64\)") as caught:
        SavedLayout(lora(rank=8)).load(tmp_path)
    assert caught.value.where == str(tmp_path)
    with pytest.raises(ModelError, match=r"differ in 4 tensors, such as .*layers\.0\.self_attn\.k_proj"):
        SavedLayout(lora(target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])).load(
            tmp_path
        )
    again = lora()
    with torch.no_grad():
        for one in again.parameters():
            one.zero_()
    SavedLayout(again).load(tmp_path)
    expected = SavedLayout(lora()).tensors()
    assert all(torch.equal(one, expected[name]) for name, one in SavedLayout(again).tensors().items())


# --- a small model of the same kind -----------------------------------------------------------------------------------


def test_a_model_whose_numbers_are_not_finite_is_not_packed() -> None:
    found = check_packing_of(AutoConfig.for_model("llama", rms_norm_eps=math.nan))
    assert not found.safe
    assert "apart by nan" in found.reason


def test_a_model_with_another_head_is_judged_by_its_hidden_states() -> None:
    assert check_packing_of(AutoConfig.for_model("llama"), auto_class="AutoModelForSequenceClassification").safe
    # Each of its tokens sees those after it as well: of its own row alone, if its attention gets each row apart.
    leaky = AutoConfig.for_model("paligemma").get_text_config()
    assert check_packing_of(leaky, auto_class="AutoModel").by_row


# --- packed layers ----------------------------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """Layers that fit into packed bytes and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.fits = torch.nn.Linear(64, 8)
        self.odd = torch.nn.Linear(63, 9, bias=False)
        self.rows_fit = torch.nn.Linear(65, 64)
        self.whole_proj = torch.nn.Linear(64, 8)
        self.base_model = self

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("bits", "keep", "packed"),
    [
        (4, [], {"fits", "rows_fit", "whole_proj"}),
        (8, [], {"fits", "whole_proj"}),
        (4, ["whole_proj"], {"fits", "rows_fit"}),
        # PEFT compares endings of names.
        (4, ["_proj"], {"fits", "rows_fit"}),
    ],
)
def test_layers_of_odd_shapes_stay_as_they_are(bits: int, keep: list[str], packed: set[str]) -> None:
    with torch.device("meta"):
        model = Odd()
    assert quantize_layers(model, bits, dtype=torch.bfloat16, keep=keep) == len(packed)
    found = {name for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert found == packed
    layer: Any = model.fits
    assert (layer.in_features, layer.out_features, layer.bits, layer.weight.requires_grad) == (64, 8, bits, False)
    assert f"bits={bits}" in repr(layer)
    # Before it is filled it knows its shape.
    assert layer.dequantize().shape == (8, 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_layer_adds_its_bias_and_computes_in_autocasts_dtype(bits: int) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 8)
    layer = QuantizedLinear(plain, bits, torch.float32)
    layer.weight = torch.nn.Parameter(layer.pack(plain.weight.detach()), requires_grad=False)
    x = torch.randn(3, 64)
    expected = x @ layer.dequantize().T + plain.bias
    torch.testing.assert_close(layer(x), expected)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=3e-2, atol=3e-2)
    assert layer.W_q is layer.weight


def test_without_bitsandbytes_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.errors.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="bitsandbytes, which is not installed") as caught:
        quantize_layers(Odd(), 4, dtype=torch.bfloat16)
    assert "finray[quantization]" in str(caught.value.repair)


# --- torch's variable-length attention --------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dropout", "used"), [(256, 0.0, True), (264, 0.0, False), (64, 0.1, False)])
def test_the_kernel_takes_heads_of_up_to_256_and_no_dropout(
    width: int, dropout: float, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnAGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    calls: list[int] = []

    def kernel(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append(query.shape[-1])
        return query

    monkeypatch.setattr(attention, "_varlen", lambda: (kernel, True))
    plain = torch.randn(1, 2, 6, width, dtype=torch.bfloat16).as_subclass(OnAGpu)
    options = {"segment_lengths": (2, 4), "cu_seq_lens_q": torch.tensor([0, 2, 6]), "max_length_q": 4}
    found, _ = packed_attention(torch.nn.Module(), plain, plain, plain, None, dropout=dropout, **options)  # type: ignore[arg-type]
    assert found.shape == (1, 6, 2, width)
    assert calls == ([width] if used else [])


def test_lengths_may_come_in_an_object_that_a_compiler_does_not_look_into() -> None:
    query = torch.randn(1, 2, 6, 8)
    for lengths in ((2, 4), (6,)):
        plain, _ = packed_attention(torch.nn.Module(), query, query, query, None, segment_lengths=lengths)
        hidden = attention.RowLengths(lengths)
        assert torch.equal(
            packed_attention(torch.nn.Module(), query, query, query, None, segment_lengths=hidden)[0], plain
        )


def test_a_role_is_that_of_the_module() -> None:
    from finray.models.roles import roles_of

    model = tiny.build_model("llama")
    roles = roles_of(model)
    assert roles == {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        **{name: "norm" for name, _ in model.named_parameters() if "norm" in name},
    }
    wrapped = adapters.add_lora(model, AdapterConfig(rank=4, target_modules=["embed_tokens", "q_proj"]), seed=1)
    embedded = {
        name.rsplit(".lora_", 1)[1]
        for name, role in roles_of(wrapped).items()
        if role == "embedding" and ".lora_" in name
    }
    assert embedded == {"embedding_A.default", "embedding_B.default"}
    assert not any("q_proj" in name for name in roles_of(wrapped))
    parts = {"get_output_embeddings": lambda: None, "base_model_prefix": "x", "named_modules": model.named_modules}
    without = SimpleNamespace(**parts)
    assert "head" not in roles_of(without).values()


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_what_a_classifier_adds_to_its_body_is_its_head(family: str) -> None:
    from finray.models.roles import roles_of

    model = tiny.build_classifier(family)
    body = f"{model.base_model_prefix}."
    heads = {name for name, _ in model.named_parameters() if not name.startswith(body)}
    assert heads
    assert {name for name, role in roles_of(model).items() if role == "head"} == heads


# --- weights that are in no file --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (None, ["classifier"]),
        (["classifier.weight"], ["classifier"]),
        (["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight"], ["bert.pooler", "classifier"]),
        (["pooler_of.weight"], ["classifier"]),
    ],
)
def test_a_head_and_a_pooler_that_is_new_are_trained_whole(new: list[str] | None, expected: list[str]) -> None:
    model = torch.nn.Module()
    model.base_model_prefix = "bert"  # type: ignore[assignment]
    model.bert, model.dropout, model.classifier = torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 2)
    mark_new(model, new)
    assert modules_to_save(model) == expected


def test_new_weights_are_as_wide_as_the_model_says_and_biases_and_norms_begin_at_zero_and_one() -> None:
    shapes = {"head.weight": (50, 400), "other.weight": (50, 400), "head.bias": (50,), "norm.weight": (64,)}
    for fields, std in (({"initializer_range": 0.3}, 0.3), ({}, 0.02)):
        config = SimpleNamespace(get_text_config=lambda fields=fields: SimpleNamespace(**fields))
        values = new_values(config, shapes, 3)
        assert {name: tuple(value.shape) for name, value in values.items()} == shapes
        for name in ("head.weight", "other.weight"):
            assert float(values[name].std()) == pytest.approx(std, rel=0.03)
            assert float(values[name].mean()) == pytest.approx(0.0, abs=0.03 * std)
        # Each from its own name, and from the seed.
        assert not torch.equal(values["head.weight"], values["other.weight"])
        assert not torch.equal(values["head.weight"], new_values(config, shapes, 4)["head.weight"])
        assert values["head.bias"].tolist() == [0.0] * 50
        assert values["norm.weight"].tolist() == [1.0] * 64


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "expected"), [(None, "<|endoftext|>", 0), (None, None, 2), (7, "<|endoftext|>", 7)]
)
def test_a_model_without_a_padding_token_has_its_tokenizers_or_else_the_end_of_sequence(
    of_model: int | None, of_tokenizer: str | None, expected: int, tmp_path: Path
) -> None:
    tokenizer = tiny.train_tokenizer()
    tokenizer.pad_token = of_tokenizer
    tokenizer.save_pretrained(str(tmp_path))
    model = SimpleNamespace(config=AutoConfig.for_model("llama", pad_token_id=of_model))
    model.config.save_pretrained(str(tmp_path))
    set_padding(model, ModelConfig(name=str(tmp_path)))
    assert model.config.pad_token_id == expected
