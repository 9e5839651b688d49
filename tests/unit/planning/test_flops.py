"""Operations per token, by hand and against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from finray.config.schema import AdapterConfig
from finray.models import adapters
from finray.planning.blueprint import LinearShape, draw_blueprint
from finray.planning.flops import LAUNCHING, flops_per_token, plan_speed
from finray.planning.placement import GPUS
from tests.support import tiny
from tests.unit.planning.test_estimate import FULL

LENGTH = 48
# Layers and widths (hidden, gated, queries, keys and values), words; tokens/s of LoRA in micro-batches of 4,096 tokens
# of Alpaca's rows on an H200 (benchmarks/RESULTS.md), and whether launches limit them.
MEASURED = {
    "smollm2-135m": ((30, 576, 1536, 576, 192), 49_152, 20_668, True),
    "qwen3-1.7b": ((28, 2048, 6144, 2048, 1024), 151_936, 17_134, True),
    "llama-3.1-8b": ((32, 4096, 14336, 4096, 1024), 128_256, 12_261, False),
}


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


@pytest.mark.parametrize("name", MEASURED)
def test_the_speed_is_near_what_was_measured_on_a_gpu(name: str) -> None:
    (layers, hidden, gated, query, keys), words, measured, launches = MEASURED[name]
    sides = ((hidden, query), (hidden, keys), (hidden, keys), (query, hidden), *[(hidden, gated)] * 3)
    linears = tuple((LinearShape(*pair), layers) for pair in sides)
    adapter = layers * 16 * sum(map(sum, sides))
    blueprint = replace(FULL, layers=layers, hidden=hidden, query=query, vocabulary=words, linears=linears)
    blueprint = replace(blueprint, adapter=adapter, trainable=adapter)
    rate = GPUS["h200-141gb"].tflops
    assert rate is not None

    def speed(tokens: int, *, again: bool = False) -> float:
        known = {"learned": 0.7, "tflops": rate, "workers": 1}
        return plan_speed(blueprint, [250] * 16, tokens=tokens, checkpointing=again, **known).tokens_per_s

    assert speed(4096) == pytest.approx(measured, rel=0.35)
    # A micro-batch of four times as many tokens takes no longer until the arithmetic does.
    assert (speed(4096) == pytest.approx(4096 / (layers * LAUNCHING))) == launches
    assert (speed(16_384) > 2 * speed(4096)) == launches
    assert speed(2**20) == speed(2**21)
    # What is made again is launched again, too.
    assert speed(4096, again=True) / speed(4096) == pytest.approx(speed(2**20, again=True) / speed(2**20))
