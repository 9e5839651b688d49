"""Classifiers over rows without padding give the logits, loss and gradients of padded batches by plain Transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from finray.config.resolved import BY_ROW
from finray.data.sampling.collate import LabelledBatch, collate_labelled
from finray.models import attention, pooled
from finray.models.blocks import blocks_of, compile_blocks, wrap_blocks
from finray.models.packed import FilledRows, PackedModel, ProbeRows
from finray.models.packing_check import check_packing_of
from tests.support import tiny

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
FAMILIES = [*tiny.ENCODERS, "llama", "qwen2"]
LENGTHS = (9, 17, 4, 1, 12)
TYPED = ("bert", "minilm")
LABELS = np.array([2, 0, 1, 2, 0])


def rows(lengths: tuple[int, ...] = LENGTHS, *, typed: bool = False, seed: int = 0) -> list[tuple[Any, Any]]:
    """Token ids, and types: pairs of texts where the model has them."""
    draw = np.random.default_rng(seed)
    return [
        (draw.integers(6, 380, length).astype(np.int32), (np.arange(length) * 2 > length).astype(np.uint8) * typed)
        for length in lengths
    ]


def batch_of(items: list[tuple[Any, Any]], labels: Any = LABELS) -> LabelledBatch:
    return collate_labelled(items, range(len(items)), {"labels": labels})


def packed(model: Any, name: str | None = attention.NAME) -> PackedModel:
    if name is not None:
        attention.register()
        model.set_attn_implementation(name)
    return PackedModel(model, precision="fp32", attention_name=name, device=CPU)


def padded_logits(model: Any, items: list[tuple[Any, Any]]) -> torch.Tensor:
    """Plain Transformers: padding on the right, an attention mask, and attention written out."""
    model.set_attn_implementation("eager")
    longest = max(len(ids) for ids, _ in items)
    inputs = {
        "input_ids": torch.full((len(items), longest), model.config.pad_token_id),
        "attention_mask": torch.zeros(len(items), longest, dtype=torch.long),
    }
    if model.config.model_type == "bert":
        inputs["token_type_ids"] = torch.zeros(len(items), longest, dtype=torch.long)
    for line, (ids, types) in enumerate(items):
        inputs["input_ids"][line, : len(ids)] = torch.from_numpy(ids)
        inputs["attention_mask"][line, : len(ids)] = 1
        if "token_type_ids" in inputs:
            inputs["token_type_ids"][line, : len(ids)] = torch.from_numpy(types)
    logits: torch.Tensor = model(**inputs).logits
    return logits


def learn(model: Any, logits: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(logits, torch.from_numpy(LABELS))
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), {name: one for name, one in found.items() if one.any()}


def assert_same(model: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (loss, gradients), (its_loss, its_gradients) = learn(model, found), learn(model, expected)
    assert loss == pytest.approx(its_loss, rel=1e-5)
    assert gradients.keys() == its_gradients.keys()
    for name, gradient in its_gradients.items():
        size = float(gradient.abs().max())
        assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * max(size, 0.1), name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_padded_rows(family: str) -> None:
    model = tiny.build_classifier(family).eval()
    items = rows(typed=family in TYPED)
    expected = padded_logits(model, items)
    found = packed(model).logits_SC(batch_of(items))
    assert_same(model, found, expected)
    # The labels tell the rows apart, and the loss sees it.
    assert found.std(dim=0).min() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_it_is_alone_whatever_lies_beside_it(family: str) -> None:
    model = packed(tiny.build_classifier(family).eval())
    items = rows(typed=family in TYPED)
    with torch.no_grad():
        together = model.logits_SC(batch_of(items))
        for number, item in enumerate(items):
            alone = model.logits_SC(batch_of([item], LABELS[:1]))
            torch.testing.assert_close(together[number : number + 1], alone, rtol=1e-5, atol=1e-5)
        # Another first row: the others keep their bits.
        changed = model.logits_SC(batch_of([rows(seed=9, typed=family in TYPED)[0], *items[1:]]))
    assert not torch.allclose(changed[0], together[0], atol=1e-3)
    assert torch.equal(changed[1:], together[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_they_are_without_the_one_that_fills_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_classifier(family).eval()
    ours, lengths = packed(model), (9, 8, 7, 5) * 25
    monkeypatch.setitem(globals(), "LABELS", np.arange(100) % 3)
    batch = batch_of(rows(lengths, typed=family in TYPED), LABELS)
    filled = FilledRows(batch)
    # 725 tokens; 22 and more would be a 32nd of them.
    assert (filled.tokens_1T.shape, filled.lengths) == ((1, 736), (*batch.lengths, 9, 2))
    assert filled.positions_1T[0, -11:].tolist() == [*range(9), 0, 1]
    assert filled.cu_seqlens.tolist() == [*batch.cu_seqlens.tolist(), 734, 736]
    assert_same(model, ours._logits_SC(filled)[:100], ours._logits_SC(batch))


@pytest.mark.parametrize(("tokens", "filled"), [(1, 1), (63, 63), (65, 66), (127, 128), (1345, 1376), (9001, 9024)])
def test_rows_are_filled_up_by_a_32nd_at_most(tokens: int, filled: int) -> None:
    found = FilledRows(batch_of(rows((tokens,)), LABELS[:1]))
    assert found.tokens_1T.shape == found.token_types_1T.shape == found.positions_1T.shape == (1, filled)
    assert sum(found.lengths) == filled == found.cu_seqlens[-1]
    assert 32 * (filled - tokens) <= tokens


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_many_short_rows_are_those_that_are_computed_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are batched within attention, with padding."""
    model = tiny.build_classifier(family).eval()
    ours, items = packed(model), [*rows((9, 8, 7, 5) * 5, typed=family in TYPED)]
    monkeypatch.setitem(globals(), "LABELS", np.arange(20) % 3)
    together = ours.logits_SC(batch_of(items, LABELS))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "BATCHED_FROM", 21)
        alone = ours.logits_SC(batch_of(items, LABELS))
    assert_same(model, together, alone)
    with torch.no_grad():
        other = rows((9, 8, 7, 5) * 5, typed=family in TYPED, seed=9)
        changed = ours.logits_SC(batch_of([other[0], *items[1:]], LABELS))
    assert not torch.allclose(changed[0], together[0], atol=1e-3)
    assert torch.equal(changed[1:], together[1:])


@pytest.mark.parametrize("kind", ["camembert", "electra", "xlm-roberta"])
def test_encoders_whose_layers_are_named_like_berts_give_what_padded_rows_give(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.ENCODERS, kind, (kind, tiny.ENCODERS["roberta"][1]))
    model = tiny.build_classifier(kind).eval()
    body, items = getattr(model, model.base_model_prefix), rows()
    found = packed(model).logits_SC(batch_of(items))
    assert body.encoder.layer[-1].forward.__func__ is pooled._forward
    torch.testing.assert_close(found, padded_logits(model, items), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_computes_what_the_head_reads(family: str) -> None:
    """In BERT and its kind, queries and all after attention for first tokens alone; that the results are the same is
    tested above."""
    model, seen = tiny.build_classifier(family).eval(), list[int]()
    ours, batch = packed(model), batch_of(rows(typed=family in TYPED))
    for block in blocks_of(model):
        products = [one for one in block.modules() if isinstance(one, torch.nn.Linear)]
        for one in (products[0], products[-1]):
            one.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    ours.logits_SC(batch)
    everything = sum(LENGTHS)
    assert seen[:-2] == [everything] * (len(seen) - 2)
    assert seen[-2:] == [len(LENGTHS) if family in ("bert", "minilm", "roberta") else everything] * 2
    seen.clear()
    ours.hidden_TH(batch)
    assert set(seen) == {everything}


@pytest.mark.parametrize(
    ("family", "harm"),
    [
        ("bert", "leak"),
        ("bert", "positions"),
        ("bert", "types"),
        ("bert", "causal"),
        ("roberta", "first position"),
        ("modernbert", "window"),
        ("modernbert-mean", "ends"),
        ("llama", "leak"),
    ],
)
def test_the_comparison_sees_a_wrong_pass(family: str, harm: str) -> None:
    """Negative controls: rows that touch, counted on, of one type, seen from one side, pooled by their ends."""
    model = tiny.build_classifier(family).eval()
    items = rows(typed=family in TYPED)
    expected = padded_logits(model, items)
    batch, ours = batch_of(items), packed(model)
    if harm == "leak":
        object.__setattr__(batch, "lengths", (LENGTHS[0] + 1, LENGTHS[1] - 1, *LENGTHS[2:]))
    elif harm == "positions":
        object.__setattr__(batch, "positions_1T", torch.arange(sum(LENGTHS))[None])
    elif harm == "types":
        ours._has_token_types = False
    elif harm == "first position":
        ours._first_position = 0
    elif harm == "ends":
        model.config.classifier_pooling = "cls"
    else:
        for module in model.modules():
            if harm == "causal" and hasattr(module, "is_causal"):
                module.is_causal = True
            if harm == "window" and hasattr(module, "sliding_window"):
                module.sliding_window = None
    with pytest.raises(AssertionError):
        assert_same(model, ours.logits_SC(batch), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_length_need_no_packing(family: str) -> None:
    """As a model that cannot be packed gets them: one plain batch, without padding or mask."""
    model = tiny.build_classifier(family).eval()
    items = rows((7, 7, 7, 7, 7), typed=family in TYPED)
    expected = padded_logits(model, items)
    assert_same(model, packed(model, None).logits_SC(batch_of(items)), expected)


def test_a_decoder_is_read_at_the_last_token_that_is_no_padding() -> None:
    """As Transformers does, which knows padding by its id alone."""
    model = tiny.build_classifier("llama").eval()
    items = rows()
    items[1][0][-3:] = model.config.pad_token_id
    items[3][0][:] = model.config.pad_token_id
    expected = padded_logits(model, items)
    torch.testing.assert_close(packed(model).logits_SC(batch_of(items)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["deberta-v2", "electra", "mpnet", "xlm-roberta", "albert", "gpt2", "bloom"])
def test_another_family_is_packed_only_where_it_gives_the_same(kind: str) -> None:
    """Whatever the answer is for a family, it must be one: no exception, and no names that are looked up."""
    found = check_packing_of(AutoConfig.for_model(kind), auto_class="AutoModelForSequenceClassification")
    assert found.safe == (kind != "albert"), found.reason
    assert found.is_told == (kind in ("electra", "xlm-roberta", "gpt2")), found.reason


def test_a_head_that_reads_more_than_the_ends_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertForSequenceClassification

    plain = BertForSequenceClassification.forward

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        found = plain(self, *args, **inputs)
        hidden = self.bert(*args, **inputs).last_hidden_state
        found.logits = found.logits + self.classifier(hidden.mean(1))
        return found

    config = AutoConfig.for_model("bert")
    assert check_packing_of(config, auto_class="AutoModelForSequenceClassification").safe
    monkeypatch.setattr(BertForSequenceClassification, "forward", forward)
    found = check_packing_of(config, auto_class="AutoModelForSequenceClassification")
    assert not found.safe
    assert "not those of the rows alone" in found.reason


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("how", ["full", "selective", "compiled"])
def test_layers_that_are_computed_again_or_compiled_give_the_same(family: str, how: str) -> None:
    model = tiny.build_classifier(family).eval()
    items = rows(typed=family in TYPED)
    ours = packed(model)
    if how == "compiled":
        compile_blocks(model, backend="eager")
    else:
        wrap_blocks(model, checkpointing=how)
    try:
        found, gradients = learn(model, ours.logits_SC(batch_of(items)))
    finally:
        attention.register()
    plain = tiny.build_classifier(family).eval()
    loss, its = learn(plain, packed(plain).logits_SC(batch_of(items)))
    assert found == pytest.approx(loss, rel=1e-6)
    for name, gradient in its.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_rows_that_a_model_pads_are_those_alone() -> None:
    """BigBird pads a row to its blocks of tokens, and leaves the padding out after its layers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    blocks = {"block_size": 2, "num_random_blocks": 1, "vocab_size": 160, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model("big_bird", **sizes, **blocks)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    batches = [ProbeRows(torch.randint(3, 160, (1, length))) for length in (17, 21, 30, 17)]
    apart, together = (
        PackedModel(model, precision="fp32", attention_name=name, device=torch.device("cpu")) for name in (None, BY_ROW)
    )
    with torch.no_grad():
        expected = torch.cat([apart.logits_SC(batch) for batch in batches])
        logits = together.logits_SC(ProbeRows(*(batch.tokens_1T for batch in batches)))
    assert model.bert.attention_type == "block_sparse", "nothing was padded"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
