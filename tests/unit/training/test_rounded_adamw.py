"""Rounding by chance: unbiased, the same for the same element wherever it lies, and nothing where nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from finray.training.optim import rounded_adamw as module
from finray.training.optim.optimizer import Optimizer
from finray.training.optim.rounded_adamw import random_bits, rounded
from tests.support.optimizing import ROLES, SHAPES, gradients, new_parameters, train_config

CPU = torch.device("cpu")
KEY = 0x0123456789ABCDEF


@pytest.mark.parametrize("between", [0.0, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("below", [1.0, -3.0, 1e-20, 6.5e4])
def test_a_value_becomes_one_of_its_neighbours_as_often_as_it_is_near(below: float, between: float) -> None:
    count = 100_000
    low = torch.tensor(below).bfloat16()
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    value = low.float() + (high.float() - low.float()) * between
    found = rounded(value.repeat(count), random_bits(KEY, 0, count, CPU)).bfloat16()
    assert set(found.tolist()) <= {float(low), float(high)}
    share = float((found == high).float().mean())
    # Four deviations of a fair draw.
    assert share == pytest.approx(between, abs=4 * (between * (1 - between) / count) ** 0.5 + 2**-16)


def test_the_bits_of_an_element_do_not_depend_on_where_it_is_cut() -> None:
    whole = random_bits(KEY, 0, 1000, CPU)
    assert torch.equal(torch.cat([random_bits(KEY, 0, 300, CPU), random_bits(KEY, 300, 700, CPU)]), whole)
    # Numbers that do not fit into 32 bits.
    far = random_bits(KEY, 2**31 - 500, 1000, CPU)
    assert torch.equal(far[700:], random_bits(KEY, 2**31 + 200, 300, CPU))


def test_the_bits_are_even_and_independent() -> None:
    count = 200_000
    draws = [random_bits(key, start, count, CPU) for key, start in ((KEY, 0), (KEY, 1), (KEY + 1, 0), (KEY + 2**32, 0))]
    bits = torch.stack([(one[:, None] >> torch.arange(32)) & 1 for one in draws]).double()
    assert (bits.mean(dim=1) - 0.5).abs().max() < 5 * 0.5 / count**0.5
    flat = torch.cat([one.T for one in bits]) - 0.5
    # The second draw is the first one element further on, by intent.
    chosen = torch.cat([flat[:32], flat[64:]])
    correlation = (chosen @ chosen.T) / count * 4
    assert (correlation - torch.eye(len(chosen))).abs().max() < 6 / count**0.5


def moved(steps: int, dtype: torch.dtype, *, seed: int = 0) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(one.detach().to(dtype)) for name, one in new_parameters().items()}
    optimizer = Optimizer(parameters, train_config("adamw", precision="bf16-true"), roles=ROLES, seed=seed)
    for step in range(steps):
        for name, value in gradients(step).items():
            parameters[name].grad = value.to(dtype)
        optimizer.step(1e-3, found_inf=torch.zeros(()))
    return {name: one.detach() for name, one in parameters.items()}


def test_the_second_moment_of_a_bf16_weight_is_right_in_the_mean() -> None:
    """Its neighbours in bf16 are 1 and 1 + 2 ** -7, and it is a third of the way between them."""
    count, second = 100_000, 1 + 2**-7 / 3
    weight = torch.nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    gradient, moments = torch.full((count,), second**0.5), [torch.zeros(count, dtype=torch.bfloat16) for _ in range(2)]
    group = {"betas": (0.9, 0.0), "lr": 0.0, "eps": 1e-8, "weight_decay": 0.0}
    bits = random_bits(KEY, 0, count, CPU)
    module._update_some(weight.data, gradient, moments, bits, group, torch.tensor(1.0), 1.0)
    assert set(moments[1].tolist()) == {1.0, 1 + 2**-7}
    assert float((moments[1] > 1).float().mean()) == pytest.approx(1 / 3, abs=0.01)


def test_weights_that_a_model_keeps_in_fp32_are_updated_as_by_torch() -> None:
    parameters = new_parameters()
    plain = Optimizer(parameters, train_config("adamw"), roles=ROLES)
    for step in range(6):
        for name, value in gradients(step).items():
            parameters[name].grad = value
        plain.step(1e-3, found_inf=torch.zeros(()))
    found = moved(6, torch.float32)
    assert all(torch.allclose(found[name], parameters[name], rtol=0, atol=1e-6) for name in SHAPES)


def lowbias32(number: int) -> int:
    """Wellons' hash of 32 bits with the constants of his list of the best, in Python's own integers."""
    mask = 2**32 - 1
    number = (number ^ number >> 16) * 0x21F0AAAD & mask
    number = (number ^ number >> 15) * 0xD35A2D97 & mask
    return number ^ number >> 15


@pytest.mark.parametrize("start", [0, 77, 2**31 - 5, 2**32 + 9])
def test_random_bits_are_those_that_the_formats_page_specifies(start: int) -> None:
    mask = 2**32 - 1
    key = 0x9E3779B97F4A7C15
    expected = [lowbias32(lowbias32((key + start + n) & mask) ^ (key >> 32)) for n in range(20)]
    assert [bits & mask for bits in random_bits(key, start, 20, CPU).tolist()] == expected


@pytest.mark.parametrize("chunk", [7, 2**17])
@pytest.mark.parametrize(("shape", "rows"), [((10, 6), (0, 4, 10)), ((9,), (0, 2, 9)), ((4, 3, 2), (0, 1, 4))])
def test_a_shard_of_a_weight_is_rounded_as_its_rows_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], rows: tuple[int, ...], chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", {"cpu": chunk})
    generator = torch.Generator().manual_seed(4)
    weight, gradient = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))

    def updated(first: int, stop: int) -> torch.Tensor:
        """These rows after three updates, as the rank has them that holds them."""
        parameter = torch.nn.Parameter(weight[first:stop].clone())
        optimizer = Optimizer({"w": parameter}, train_config("adamw", precision="bf16-true"), roles={}, seed=3)
        monkeypatch.setattr(module, "local_rows", lambda tensor: (tensor, first))
        for _ in range(3):
            parameter.grad = gradient[first:stop].clone()
            optimizer.step(1e-3, found_inf=torch.zeros(()))
        return parameter.detach()

    whole = updated(0, rows[-1])
    assert torch.equal(torch.cat([updated(*cut) for cut in pairwise(rows)]), whole)
    assert not torch.equal(whole, weight)
