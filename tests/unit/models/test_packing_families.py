"""Packing changes nothing: gradients of packs are those of rows alone, and no row can touch another."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from finray import compat
from finray.config.resolved import BY_ROW
from finray.config.schema import AdapterConfig
from finray.models import adapters, attention, states
from finray.models.blocks import wrap_blocks
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny
from tests.support.packing import assert_equal_gradients, batch_of, gradients, packed_model, reference_gradients, rows

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "gemma2", "gpt_oss", "gemma4", *tiny.HYBRIDS]
CPU = torch.device("cpu")
NAMES = {attention.NAME: attention.NAME}


def task_of(model: Any) -> CausalLM:
    usual = model.config._attn_implementation
    return CausalLM(model, precision="fp32", attention_name=NAMES.get(usual, BY_ROW), device=CPU)


def model_of(family: str) -> Any:
    """With finray's attention, or its own."""
    if family not in tiny.OWN:
        return packed_model(family)
    model = tiny.build_model(family).eval()
    compat.name_body(model)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *tiny.OWN])
def test_packed_gradients_are_those_of_plain_transformers(family: str) -> None:
    model = model_of(family)
    task = task_of(model)
    # Two rows are of one length.
    items = [*rows(), rows(1)[0]]
    loss = task.outputs(batch_of(items))
    loss.backward()
    expected_loss, expected = reference_gradients(family, items)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert_equal_gradients(gradients(model), expected)
    assert task.packed._has_plain_head, "the fast head must be the one that was tested"


@pytest.mark.parametrize("family", [*FAMILIES, *tiny.OWN])
def test_perturbing_one_row_leaves_the_others_alone(family: str) -> None:
    """Gradient of every row's loss with respect to every row's embeddings: off the diagonal all exact zeros."""
    model = task_of(model_of(family)).model
    items = rows()
    batch = batch_of(items)
    embedded = model.get_input_embeddings()(batch.tokens_1T).detach().requires_grad_()
    body = getattr(model, model.base_model_prefix)
    told = {} if family in tiny.OWN else {"position_ids": batch.positions_1T, "segment_lengths": batch.lengths}
    with states.of_rows(batch.lengths):
        hidden = body(inputs_embeds=embedded, use_cache=False, **told).last_hidden_state[0]
    starts = batch.cu_seqlens.tolist()
    for row in range(len(items)):
        span = slice(starts[row], starts[row + 1])
        (grad,) = torch.autograd.grad(hidden[span].square().sum(), embedded, retain_graph=True)
        outside = torch.cat([grad[0, : starts[row]], grad[0, starts[row + 1] :]])
        assert torch.count_nonzero(outside) == 0
        assert torch.count_nonzero(grad[0, span]) > 0


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5", *tiny.OWN])
def test_the_leak_test_can_see_a_leak(family: str) -> None:
    """Negative control: told that two rows are one, the same model lets them touch."""
    model = task_of(model_of(family)).model
    batch = batch_of(rows())
    embedded = model.get_input_embeddings()(batch.tokens_1T).detach().requires_grad_()
    joined = (batch.lengths[0] + batch.lengths[1], *batch.lengths[2:])
    told = {} if family in tiny.OWN else {"position_ids": batch.positions_1T, "segment_lengths": joined}
    body = getattr(model, model.base_model_prefix)
    with states.of_rows(joined):
        hidden = body(inputs_embeds=embedded, use_cache=False, **told).last_hidden_state[0]
    second = slice(batch.lengths[0], batch.lengths[0] + batch.lengths[1])
    (grad,) = torch.autograd.grad(hidden[second].square().sum(), embedded)
    assert torch.count_nonzero(grad[0, : batch.lengths[0]]) > 0


def test_the_sliding_window_is_seen() -> None:
    """Negative control: without the window, Gemma 3's gradients are others."""
    model = packed_model("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    task_of(model).outputs(batch_of(rows())).backward()
    _, expected = reference_gradients("gemma3", rows())
    with pytest.raises(AssertionError):
        assert_equal_gradients(gradients(model), expected)


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_a_state_that_goes_on_from_row_to_row_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, and rows of one length beside others: what keeps them apart makes the gradients right."""
    items = [*rows(), rows(1)[0]]
    _, expected = reference_gradients(family, items)
    monkeypatch.setattr(states, "_CHUNK", 4)
    model = packed_model(family)
    task_of(model).outputs(batch_of(items)).backward()
    assert_equal_gradients(gradients(model), expected)
    monkeypatch.setattr(states, "separate", lambda _, on_cpu: None)
    model = packed_model(family)
    with suppress(ValueError):  # Gated delta nets refuse packed rows without their kernel.
        task_of(model).outputs(batch_of(items)).backward()
        with pytest.raises(AssertionError):
            assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_5", "mamba", *tiny.OWN])
def test_lora_and_checkpointed_activations_give_the_same_gradients(family: str) -> None:
    results = []
    for checkpointed in (False, True):
        # PEFT refuses some layers of Mamba.
        targets = ["in_proj", "x_proj"] if family == "mamba" else "all-linear"
        settings = AdapterConfig(rank=4, dropout=0.0, target_modules=targets)
        model = adapters.add_lora(model_of(family), settings, seed=3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(len(name)))
        task = task_of(model)
        if checkpointed:
            wrap_blocks(task.model, checkpointing="full")
        model.train()
        task.outputs(batch_of(rows())).backward()
        results.append(gradients(model))
        assert all("lora" in name for name in results[-1])
    assert_equal_gradients(results[1], results[0], 1e-6)


def test_a_head_that_is_not_understood_is_left_to_the_model() -> None:
    """Negative control of the proof on the first batch: a model whose logits are not its projection's."""
    model = packed_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 3.0)
    task = task_of(model)
    loss = task.outputs(batch_of(rows()))
    assert task.packed._has_plain_head is False
    plain = tiny.build_model("llama").eval()
    expected = torch.zeros(())
    for ids, mask in rows():
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        learned = torch.from_numpy(mask.astype(bool))[1:]
        expected = expected + F.cross_entropy(
            3 * plain(input_ids=tokens).logits[0, :-1][learned], tokens[0, 1:][learned], reduction="sum"
        )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        # Something before the projection makes hidden states wider.
        (
            "rembert",
            {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "is_decoder": True}
            | {"input_embedding_size": 32, "output_embedding_size": 96},
        ),
        # It makes the logits of all tokens, whichever are asked for.
        ("prophetnet", {"num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 128}),
    ],
)
def test_a_head_of_its_own_gives_the_loss_of_plain_transformers(kind: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, vocab_size=384, hidden_size=64, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = rows()[1]
    task = CausalLM(model, precision="fp32", attention_name=None, device=CPU)
    logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0, :-1]
    learned = torch.from_numpy(mask).bool()[1:]
    expected = F.cross_entropy(logits[learned], torch.from_numpy(ids).long()[1:][learned], reduction="sum")
    assert task.outputs(batch_of([(ids, mask)])).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("capped_at", [40.0, 1e9])
def test_the_head_is_chosen_alike_whatever_rows_come_first(capped_at: float) -> None:
    """Each rank has its own first rows, and a restart others. A cap shows in large logits only, which come later."""
    first = [batch_of(rows(seed)[:1]) for seed in range(3)]
    found = []
    for batch in first:
        model = packed_model("llama")
        model.lm_head.register_forward_hook(lambda module, inputs, output: capped_at * torch.tanh(output / capped_at))
        found.append(task_of(model).packed.has_plain_head(batch))
    assert found == [capped_at > 1e6] * 3
    # As they are, the logits of these rows do not show it.
    logits = packed_model("llama")(first[0].tokens_1T, segment_lengths=first[0].lengths).logits
    assert torch.allclose(40.0 * torch.tanh(logits / 40.0), logits, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_fast_head_is_that_of_every_family(family: str) -> None:
    model = packed_model(family) if family not in ("bloom", "mamba") else tiny.build_model(family).eval()
    name = None if family in ("bloom", "mamba") else attention.NAME
    for precision in ("fp32", "bf16"):
        packed = CausalLM(model, precision=precision, attention_name=name, device=CPU).packed
        with packed.autocast():
            assert packed.has_plain_head(batch_of(rows()[:1]))


@pytest.mark.parametrize("plain_head", [True, False])
def test_rows_of_one_length_share_a_pass_of_a_model_that_cannot_be_packed(plain_head: bool) -> None:
    model = tiny.build_model("bloom").eval()
    task = CausalLM(model, precision="fp32", attention_name=None, device=CPU)
    task.packed._has_plain_head = plain_head
    generator = np.random.default_rng(3)
    items = [(generator.integers(3, 380, 7).astype(np.int32), np.array([0, 1, 1, 0, 1, 0, 1], np.uint8))] * 2
    items += [(generator.integers(3, 380, 7).astype(np.int32), np.array([0, 0, 0, 0, 1, 1, 1], np.uint8))]
    loss = task.outputs(batch_of(items))
    loss.backward()
    expected_loss, expected = reference_gradients("bloom", items)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert_equal_gradients(gradients(model), expected)
    with pytest.raises(AssertionError, match="rows of one length"):
        task.outputs(batch_of(rows()))
