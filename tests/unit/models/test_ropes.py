"""Rotary embeddings that depend on the length of a row give each row what Transformers gives it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig

from finray.models import attention, ropes
from finray.models.packing_check import check_packing_of, shrunk
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny
from tests.support.packing import assert_equal_gradients, batch_of, gradients, rows

# Of the rows (9, 17, 4 and 12 tokens), one is longer.
TURN = 12
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": TURN, "factor": 4.0}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [1.5 + step for step in range(8)]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
USUAL = {"rope_type": "default", "rope_theta": 10000.0}
SHORT = {"max_position_embeddings": TURN}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": TURN}),
    "llama-longrope": ("llama", {"rope_parameters": LONG}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC} | SHORT),
    "gemma3-longrope": ("gemma3", {"rope_parameters": {"full_attention": LONG, "sliding_attention": USUAL}}),
    "gemma3-dynamic": ("gemma3", {"rope_parameters": {"full_attention": USUAL, "sliding_attention": DYNAMIC}} | SHORT),
}


def alone(case: str, items: list[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of rows, and their gradients added up: plain Transformers, a new model for each row."""
    family, settings = CASES[case]
    losses, total = [], dict[str, torch.Tensor]()
    for ids, mask in items:
        model = tiny.build_model(family, **settings).eval()
        model.set_attn_implementation("eager")
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        learned = torch.from_numpy(mask.astype(bool))[1:]
        loss = F.cross_entropy(model(tokens).logits[0, :-1][learned], tokens[0, 1:][learned], reduction="sum")
        loss.backward()
        losses.append(loss.item())
        for name, grad in gradients(model).items():
            total[name] = total.get(name, torch.zeros(())) + grad
    return losses, total


def in_batches(case: str, batches: list[list[Any]], *, packs: bool = True) -> tuple[list[float], Any]:
    family, settings = CASES[case]
    model = tiny.build_model(family, **settings).eval()
    if packs:
        attention.register()
        model.set_attn_implementation(attention.NAME)
    name = attention.NAME if packs else None
    task = CausalLM(model, precision="fp32", attention_name=name, device=torch.device("cpu"))
    losses = []
    for items in batches:
        loss = task.outputs(batch_of(items))
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_packs_and_micro_batches_are_the_rows_alone(case: str) -> None:
    # The longest first: dynamic NTK in Transformers remembers it.
    items = sorted([*rows(), *rows(1)], key=lambda row: -len(row[0]))
    losses, expected = alone(case, items)
    for size in (1, 5, len(items)):
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        found, grads = in_batches(case, batches)
        sums = [sum(losses[start : start + size]) for start in range(0, len(items), size)]
        assert found == pytest.approx(sums, rel=1e-5)
        assert_equal_gradients(grads, expected)
    same = [[row for row in items if len(row[0]) == length] for length in (17, 12, 9, 4)]
    found, grads = in_batches(case, same, packs=False)
    assert sum(found) == pytest.approx(sum(losses), rel=1e-5)
    assert_equal_gradients(grads, expected)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_without_it_a_long_row_changes_the_others(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, also of the check: it reaches the length at which the frequencies change."""
    monkeypatch.setattr(ropes, "_kinds", lambda module: set())
    losses, expected = alone(case, rows())
    found, grads = in_batches(case, [rows()])
    assert found[0] != pytest.approx(sum(losses), rel=1e-4)
    with pytest.raises(AssertionError):
        assert_equal_gradients(grads, expected)
    family, settings = CASES[case]
    # The model's own attention, with each row alone, would still do.
    assert not check_packing_of(tiny.build_model(family, **settings).config).is_told


@pytest.mark.parametrize("case", CASES)
def test_such_models_may_be_packed(case: str) -> None:
    family, settings = CASES[case]
    # As real models have it: far above the rows of the check.
    config = tiny.build_model(family, **settings | {"max_position_embeddings": 4096}).config
    assert check_packing_of(config).safe


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("modernbert", "local_attention"),
        ("llama4_text", "floor_scale"),
        ("deepseek_v32", "index_topk"),
        ("doge", "keep_window_size"),
        ("inkling_text", "sliding_window_size"),
        ("phi3", "original_max_position_embeddings"),
    ],
)
def test_the_check_reaches_what_changes_with_the_length_under_any_name(kind: str, name: str) -> None:
    config = AutoConfig.for_model(kind)
    assert getattr(config, name) > 17
    assert getattr(shrunk(config), name) <= TURN
