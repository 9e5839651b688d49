"""Scores, against formulas worked out here and plain Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from finray.errors import ConfigError
from finray.evaluation.metrics import Row, Scores, mean_loss
from finray.models import attention
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny


def longest(answers: list[str], references: list[str]) -> int:
    return max(map(len, answers)) * 100 + max(map(len, references))


def test_scores_hold_every_metric_by_its_name_and_the_loss() -> None:
    scores = Scores.of(["abc", "x"], ["abc", "xy"], loss=1.5, metrics=["exact_match", f"{__name__}:longest"])
    assert scores.metrics == {"exact_match": 0.5, "longest": 303.0}
    assert scores.perplexity == pytest.approx(4.4816890703)
    assert scores.json() == {"exact_match": 0.5, "longest": 303.0, "loss": 1.5, "perplexity": scores.perplexity}


def test_the_perplexity_of_a_huge_loss_is_a_number() -> None:
    assert 1e300 < Scores.of([], [], loss=1e6, metrics=[]).perplexity < math.inf


def test_an_unknown_metric_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ConfigError) as caught:
        Scores.of([], [], loss=1.0, metrics=["bleu_of_mine"])
    assert "evaluation.metrics" in str(caught.value)


def rows_of_unequal_answers() -> list[Row]:
    """The mean of their means is another number than the mean over all their targets."""
    generator = np.random.default_rng(3)
    rows = []
    for length, learned in ((9, [7, 8]), (30, list(range(4, 30))), (12, [3, 4, 9]), (5, [4])):
        mask = np.zeros(length, dtype=np.uint8)
        mask[learned] = 1
        rows.append((generator.integers(3, 384, length).astype(np.int32), mask))
    return rows


def naive_loss(forward: Callable[[torch.Tensor], torch.Tensor], rows: list[Row]) -> float:
    """Each learned token from those before it, one row at a time."""
    losses = []
    for ids, mask in rows:
        logits = forward(torch.tensor(ids[None].astype(np.int64)))[0].double().log_softmax(-1)
        losses += [-float(logits[place - 1, ids[place]]) for place in np.flatnonzero(mask)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("packs", [True, False])
@torch.no_grad()
def test_the_mean_loss_is_over_all_targets_and_by_plain_transformers(packs: bool) -> None:
    model = tiny.build_model("llama").eval()
    rows = rows_of_unequal_answers()
    expected = naive_loss(lambda ids: model(ids).logits, rows)
    before = model.config._attn_implementation
    told: list[int] = []
    assert mean_loss(model, rows, packs=packs, progress=told.append) == pytest.approx(expected, rel=1e-5)
    assert told == [1, 2, 3, 4]
    assert model.config._attn_implementation == before != attention.NAME


@torch.no_grad()
def test_the_mean_loss_of_an_adapter_and_of_its_base() -> None:
    torch.manual_seed(1)
    model = get_peft_model(
        tiny.build_model("llama"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.eval()
    rows = rows_of_unequal_answers()
    tuned = naive_loss(lambda ids: model(ids).logits, rows)
    assert mean_loss(model, rows, packs=True) == pytest.approx(tuned, rel=1e-5)
    with model.disable_adapter():
        base = naive_loss(lambda ids: model(ids).logits, rows)
        assert mean_loss(model, rows, packs=True) == pytest.approx(base, rel=1e-5)
    assert abs(base - tuned) > 0.01


@torch.no_grad()
def test_the_loss_of_a_bf16_model_is_that_of_bf16_arithmetic() -> None:
    model = tiny.build_model("llama").eval().bfloat16()
    rows = rows_of_unequal_answers()
    expected = naive_loss(lambda ids: model(ids).logits, rows)
    assert mean_loss(model, rows, packs=False) == pytest.approx(expected, rel=5e-3)


def test_no_gradients_are_kept() -> None:
    model: Any = tiny.build_model("llama").eval()
    seen: list[bool] = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    mean_loss(model, rows_of_unequal_answers()[:1], packs=False)
    assert seen == [False]


def test_losses_are_summed_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 2 ** 24 + 1 has no place in 32 bits: over many rows the mean would drift."""

    def score(task: CausalLM, batch: Any, sums: torch.Tensor) -> None:
        sums += torch.tensor([2.0**24 + 1, 1], dtype=torch.float64)

    monkeypatch.setattr(CausalLM, "score", score)
    assert mean_loss(tiny.build_model("llama").eval(), rows_of_unequal_answers(), packs=False) == 2.0**24 + 1


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_the_arithmetic_is_that_of_the_weights(
    dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    build = CausalLM.__init__

    def init(task: CausalLM, model: Any, **options: Any) -> None:
        asked.append(options["precision"])
        build(task, model, **options)

    monkeypatch.setattr(CausalLM, "__init__", init)
    mean_loss(tiny.build_model("llama").eval().to(dtype), rows_of_unequal_answers()[:1], packs=False)
    assert asked == [precision]
