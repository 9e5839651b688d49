"""Operations per token, by hand and against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from finray.config.schema import AdapterConfig
from finray.models import adapters
from finray.planning.blueprint import draw_blueprint
from finray.planning.flops import flops_per_token
from tests.support import tiny

LENGTH = 48


@pytest.mark.parametrize("method", ["none", "lora"])
def test_operations_are_those_that_torch_counts(method: str) -> None:
    model = tiny.build_model("llama")
    model.set_attn_implementation("eager")
    blueprint = draw_blueprint(tiny.build_model("llama"), AdapterConfig(method=method, rank=4))
    if method == "lora":
        model.requires_grad_(False)
        model = adapters.add_lora(model, AdapterConfig(rank=4), seed=0)
    counter = FlopCounterMode(display=False)
    with counter:
        tokens = torch.randint(3, 380, (1, LENGTH))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    # Eager attention works out the scores that the mask hides too: twice what causal attention needs.
    expected = flops_per_token(blueprint, row=2 * LENGTH, learned=1.0, checkpointing=False)
    # The first layer's inputs and the frozen ones need no gradient.
    assert counter.get_total_flops() / LENGTH == pytest.approx(expected.useful, rel=0.04)


def test_checkpointing_adds_a_forward_pass_without_the_head() -> None:
    blueprint = draw_blueprint(tiny.build_model("llama"), AdapterConfig(method="none"))
    plain = flops_per_token(blueprint, row=64, learned=0.5, checkpointing=False)
    again = flops_per_token(blueprint, row=64, learned=0.5, checkpointing=True)
    assert (plain.again, again.useful) == (0.0, plain.useful)
    assert again.again == pytest.approx((plain.useful - 3 * blueprint.head) / 3)
