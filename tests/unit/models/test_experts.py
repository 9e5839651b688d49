"""Products of experts on a CPU: those of each expert's own tokens, in autocast's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from finray.models import experts

# None; one token; less than a multiple, a whole one, one more; and three tokens of no expert after them.
COUNTS, REST = (0, 1, 7, 64, 65, 0, 130), 3


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randn(sum(COUNTS) + REST, 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(COUNTS), 24, 40, dtype=dtype, requires_grad=True)
    return tokens, weight, torch.tensor(COUNTS).cumsum(0)


def naive(tokens: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...] = COUNTS) -> torch.Tensor:
    rows = torch.split(tokens[: sum(counts)], counts)
    products = [row @ matrix for row, matrix in zip(rows, weight, strict=True)]
    return torch.cat([*products, tokens.new_zeros(len(tokens) - sum(counts), weight.shape[2])])


def test_products_and_gradients_are_of_own_tokens() -> None:
    tokens, weight, ends = inputs(torch.float64)
    bias = torch.randn(len(COUNTS), 40, dtype=torch.float64, requires_grad=True)
    applied: Any = experts._Products.apply(tokens, weight, bias, tuple(ends.tolist()))  # type: ignore[no-untyped-call]
    own = torch.repeat_interleave(bias, torch.tensor(COUNTS), dim=0)
    expected = naive(tokens, weight) + torch.cat([own, own.new_zeros(REST, 40)])
    factors = torch.randn(len(tokens), 40, dtype=torch.float64)
    gradients = [torch.autograd.grad((each * factors).sum(), (tokens, weight, bias)) for each in (applied, expected)]
    for actual, wanted in zip((applied, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-12, atol=1e-12)
    # Negative control: a token that is another expert's.
    plain = naive(tokens, weight)
    assert not torch.allclose(naive(tokens, weight, (1, *COUNTS[2:], 0)), plain, rtol=1e-3)


@pytest.mark.parametrize("lower", [True, False])
def test_experts_with_a_bias_compute_what_those_of_transformers_do(lower: bool) -> None:
    experts.register()
    torch.manual_seed(1)
    config = AutoConfig.for_model("gpt_oss", hidden_size=32, intermediate_size=48, num_local_experts=6)
    config._experts_implementation = "grouped_mm"
    module: Any = GptOssExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, shares = torch.randn(70, 32, requires_grad=True), torch.rand(70, 3, requires_grad=True)
    # The last expert gets no token.
    chosen = torch.rand(70, 5).topk(3).indices
    inputs = (hidden, shares, *module.parameters())
    grouped: Any = moe.grouped_mm_experts_forward
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        actual = module(hidden, chosen, shares)
    expected = grouped(module, hidden, chosen, shares)
    factors = torch.randn(70, 32)
    gradients = [torch.autograd.grad((each * factors).sum(), inputs) for each in (actual, expected)]
    for ours, exact in zip((actual, *gradients[0]), (expected, *gradients[1]), strict=True):
        apart = ((ours - exact).abs().max() / exact.abs().max()).item()
        assert (1e-5 < apart < 3e-2) if lower else apart == 0


@pytest.mark.parametrize("lower", [True, False])
def test_weights_in_fp32_are_cast_as_those_of_linear_layers_are(lower: bool) -> None:
    tokens, weight, ends = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        product = experts.product(lambda x, w, _: naive(x, w), tokens, weight, ends)
    assert product.dtype == (torch.bfloat16 if lower else torch.float32)
    expected = naive(tokens.double(), weight.double())
    gradient, wanted = (torch.autograd.grad(each.float().square().sum(), weight)[0] for each in (product, expected))
    for actual, exact in ((product, expected), (gradient, wanted)):
        apart = (actual - exact).abs().max() / exact.abs().max()
        # Rounded, and only where it is asked for.
        assert (1e-4 if lower else 0) < apart < (2e-2 if lower else 1e-5)
