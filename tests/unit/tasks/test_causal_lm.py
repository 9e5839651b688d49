"""The loss of a causal language model, where it is more than that of its words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finray.data.sampling.collate import collate, collate_branches
from finray.errors import ModelError
from finray.models import attention
from finray.models.packed import require_router_loss
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny

WEIGHT = 0.3


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_the_loss_of_a_router_has_the_gradient_of_plain_transformers_and_is_not_in_the_recorded_loss(
    family: str,
) -> None:
    plain = tiny.build_model(family, router_aux_loss_coef=WEIGHT).train()
    words = np.array([5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    tokens = torch.tensor(words)[None]
    outputs = plain(input_ids=tokens, labels=tokens, output_router_logits=True)
    outputs.loss.backward()
    attention.register()
    model = tiny.build_model(family).train()
    model.set_attn_implementation(attention.NAME)
    task = CausalLM(model, precision="fp32", attention_name=attention.NAME, device=torch.device("cpu"))
    batch = collate([(words, np.ones(len(words), dtype=bool))], [0])
    without = task.outputs(batch).detach()
    task.router_loss = WEIGHT
    loss = task.outputs(batch)
    assert loss.item() == without.item()
    assert loss.item() / 9 == pytest.approx((outputs.loss - WEIGHT * outputs.aux_loss).item(), rel=1e-5)
    (loss / 9).backward()  # type: ignore[no-untyped-call]
    expected = dict(plain.named_parameters())
    routers = 0
    for name, weight in model.named_parameters():
        theirs = expected[name].grad
        assert weight.grad is not None
        assert theirs is not None
        assert float((weight.grad - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()) + 1e-8, name
        routers += "mlp.gate" in name or "mlp.router" in name
    assert routers
    # The control: without it the router learns something else.
    model.zero_grad()
    task.router_loss = 0.0
    (task.outputs(batch) / 9).backward()  # type: ignore[no-untyped-call]
    router = next(name for name in expected if "mlp.gate.weight" in name or "mlp.router.weight" in name)
    other, theirs = model.get_parameter(router).grad, expected[router].grad
    assert float((other - theirs).abs().max()) > 1e-2 * float(theirs.abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rows_that_branch_from_a_prompt_have_the_log_probabilities_and_gradients_of_rows_alone(family: str) -> None:
    """Windows, caps and sinks too. Of the groups, one has nothing in common, and one has targets in what it shares."""
    draw = np.random.default_rng(5)
    prompt, lengths, sizes = draw.integers(5, 380, 21), [4, 9, 2, 1, 6, 3, 5], [2, 3, 2]
    rows: list[Any] = []
    for number, length in enumerate(lengths):
        stem = prompt[:0] if number > 4 else prompt[: 21 - 3 * (number > 1)]
        ids = np.concatenate([stem, draw.integers(5, 380, length)]).astype(np.int32)
        mask = (np.arange(len(ids)) >= (9 if number in (2, 3, 4) else len(stem))).astype(np.uint8)
        rows.append((ids, mask))
    rows[6] = (np.concatenate([rows[5][0][:1] + 1, rows[6][0]]).astype(np.int32), np.ones(6, np.uint8))
    attention.register()
    model = tiny.build_model(family).train()
    model.set_attn_implementation(attention.NAME)
    task = CausalLM(model, precision="fp32", attention_name=attention.NAME, device=torch.device("cpu"))
    assert task.packed.shares_prompts
    scale, found = torch.linspace(-1, 1, sum(int(mask[1:].sum()) for _, mask in rows)), list[Any]()
    for batch in (collate(rows, range(7)), collate_branches(rows, range(7), {}, sizes)):
        logprobs = task.packed.log_probabilities_K(batch)
        model.zero_grad()
        (logprobs * scale).sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        found.append((logprobs.detach(), gradients, batch))
    (alone, theirs, rows_alone), (branched, ours, shared) = found
    assert shared.tokens == rows_alone.tokens - 21 - 2 * 18
    assert (shared.targets_per_row, shared.targets_K.tolist()) == (
        rows_alone.targets_per_row,
        rows_alone.targets_K.tolist(),
    )
    torch.testing.assert_close(branched, alone, rtol=1e-4, atol=1e-4)
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-4 * float(gradient.abs().max()) + 1e-6, name
    # The control: a branch that does not see its prompt.
    pieces = tuple((length, ()) for length in shared.lengths)
    other = task.packed.log_probabilities_K(replace(shared, branches=pieces))
    assert float((other.detach() - alone).abs().max()) > 1e-2


def test_a_task_from_before_there_were_objectives_is_refused() -> None:
    with pytest.raises(TypeError, match="`loss_sum` of Older belongs to an objective"):
        type("Older", (CausalLM,), {"loss_sum": lambda self, batch: 0.0})


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_model_without_such_a_loss_is_refused(family: str) -> None:
    with pytest.raises(ModelError, match="no loss of a router"):
        require_router_loss(tiny.build_model(family), "tiny")
