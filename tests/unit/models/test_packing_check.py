"""Which models may be packed is found out by trying, on a small model of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from finray.errors import ModelError
from finray.models import by_row, states
from finray.models.packing_check import check_packing_of, row_limit
from tests.support import tiny

LARGE = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}


# Their real sizes: nothing of that size may be built.
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", LARGE | {"num_key_value_heads": 8, "vocab_size": 128_256}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mistral", {"sliding_window": 4096}),
        ("mixtral", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("opt", {}),
        # Sinks, in some with other values than keys.
        *((kind, {}) for kind in ("gpt_oss", "mimo_v2_flash", "granite_swa")),
        # Layers that differ from each other, and some that borrow the keys of others.
        *((kind, {}) for kind in ("gemma4_text", "gemma3n_text")),
        ("gemma4_text", {"num_kv_shared_layers": 20, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 8,
                         "moe_intermediate_size": 704, "attention_k_eq_v": True, "num_global_key_value_heads": 2}),
        # Sizes that follow from others, and such as their classes leave open.
        *((kind, {}) for kind in ("deepseek_v2", "longcat_flash", "dots1", "hunyuan_v1_dense", "ministral")),
    ],
)  # fmt: skip
def test_families_that_may_be_packed(kind: str, fields: dict[str, Any]) -> None:
    found = check_packing_of(AutoConfig.for_model(kind, **fields))
    assert found.is_told, found.reason


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        # Biases by distance in an attention of its own.
        ("bloom", {}, "attention is its own"),
        # Its state is in none of the layers that are known to carry one, and it halves states between its blocks.
        ("rwkv", {}, "state from token to token"),
        # Rows end every so many tokens for some layers, which their mask alone says.
        ("llama4_text", {}, "not those of"),
        # Biases by distance, which finray's attention does not know.
        ("inkling_text", {}, "uses `position_bias`"),
        # Learned positions that are counted, and not taken from the caller.
        ("xglm", {}, "attention is its own"),
        # Its attention is chosen by name, and does not hand on what it is given.
        ("stablelm", {}, "does not pass row lengths"),
        # Positions are places in the row, also of a padded one.
        ("bart", {}, "not those of"),
    ],
)
def test_families_whose_attention_gets_each_row_alone(
    kind: str, fields: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what would be said of them if it did not."""
    found = check_packing_of(AutoConfig.for_model(kind, **fields))
    assert found.by_row == found.safe == (kind != "rwkv"), found.reason
    monkeypatch.setattr(by_row, "_parts_apart", lambda block: [])
    found = check_packing_of(AutoConfig.for_model(kind, **fields))
    assert not found.safe
    assert reason in found.reason
    assert kind in found.warning
    assert found.pads or kind in ("rwkv", "bart")


@pytest.mark.parametrize("family", ["lfm2", "nemotron_h"])
def test_rows_of_a_model_with_a_state_are_packed_where_the_state_is_that_of_each_row(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields = tiny.HYBRIDS[family]
    config = AutoConfig.for_model(kind, **fields)
    found = check_packing_of(config)
    assert (found.safe, found.has_states) == (True, True), found.reason
    assert not check_packing_of(AutoConfig.for_model("llama")).has_states
    monkeypatch.setattr(states, "separate", lambda _, on_cpu: None)
    # Then its attention gets each row alone, and what carries the state with it.
    assert check_packing_of(config).by_row
    monkeypatch.setattr(by_row, "_parts_apart", lambda block: [])
    assert "not those of the rows alone" in check_packing_of(config).reason


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bert", {"is_decoder": True}),
        # Attention of its own.
        ("xlm", {"causal": True}),
        # As PaliGemma's, which reads a prompt both ways.
        ("gemma", {"use_bidirectional_attention": False}),
    ],
)
def test_a_model_that_sees_what_it_is_to_predict_is_refused(kind: str, fields: dict[str, bool]) -> None:
    check_packing_of(AutoConfig.for_model(kind, **fields))
    ahead = AutoConfig.for_model(kind, **{name: not value for name, value in fields.items()})
    with pytest.raises(ModelError, match=rf"a {kind} .* sees the tokens that it is to predict") as caught:
        check_packing_of(ahead)
    assert "is_decoder" in str(caught.value.repair)
    if kind == "bert":
        assert check_packing_of(ahead, auto_class="AutoModelForSequenceClassification").safe


def test_a_model_that_cannot_be_tried_out_is_not_packed() -> None:
    config = AutoConfig.for_model("llama", hidden_act="nothing")
    found = check_packing_of(config)
    assert not found.safe
    assert "can be tried out" in found.reason
    # The cause, and not the line that announces it.
    found = check_packing_of(AutoConfig.for_model("dots3_note_text"))
    assert "SWA head_dim must equal qk_nope_head_dim" in found.reason


@pytest.mark.parametrize(("hidden", "safe"), [(1024, True), (16_384, False)])
def test_sizes_that_hang_together_in_ways_no_name_tells_stay(
    hidden: int, safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer layers and tokens are cheap enough, unless the model is wide."""
    made, widths = LlamaAttention.__init__, list[int]()

    def picky(self: Any, config: Any, layer_idx: int) -> None:
        widths.append(config.hidden_size)
        if config.hidden_size < 1024:
            raise ValueError("too narrow for me")
        made(self, config, layer_idx)

    monkeypatch.setattr(LlamaAttention, "__init__", picky)
    config = AutoConfig.for_model("llama", hidden_size=hidden, num_hidden_layers=48, vocab_size=99_000)
    found = check_packing_of(config)
    assert found.safe is safe
    assert safe or "too narrow for me" in found.reason
    # Two ways, then two layers without values, and with.
    assert widths == [64, 64, hidden, hidden] + [hidden] * 2 * safe


def test_no_random_state_is_used_up() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_packing_of(AutoConfig.for_model("llama"))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("family", "sizes", "positions"),
    [
        ("bert", {}, 80),
        # Six rows of its table lie before the first position.
        ("roberta", {}, 74),
        ("distilbert", {"max_position_embeddings": 600}, 600),
        ("modernbert", {}, None),
        ("gpt2", {"n_positions": 40}, 40),
        # Its table has two rows more than the configuration says.
        ("opt", {"max_position_embeddings": 40}, 40),
        ("llama", {}, None),
    ],
)
def test_learned_positions_are_as_many_as_a_row_may_have_tokens(
    family: str, sizes: dict[str, int], positions: int | None
) -> None:
    is_encoder = family in tiny.ENCODERS
    model = tiny.build_classifier(family, **sizes) if is_encoder else tiny.build_model(family, **sizes)
    auto_class = "AutoModelForSequenceClassification" if is_encoder else "AutoModelForCausalLM"
    assert check_packing_of(model.config, auto_class=auto_class).positions == positions
    assert row_limit(model)[1] == (positions is not None)
    if positions is not None:
        assert row_limit(model)[0] == positions
        model(torch.full((1, positions), 9))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, positions + 1), 9))


def test_a_caller_in_autocast_changes_nothing() -> None:
    """Where rows of a run are answered, the engine is made in autocast; bf16's rounding would look like a leak."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check_packing_of(AutoConfig.for_model("llama")).safe


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (MemoryError(), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), False),
        (ImportError("mamba needs a package"), False),
        (ValueError("this shape is none"), True),
    ],
)
def test_a_lack_of_memory_or_of_a_package_is_no_word_on_the_model(
    error: Exception, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", refuse)
    found = check_packing_of(AutoConfig.for_model("llama"))
    assert (found.safe, found.lasting) == (False, lasting)
