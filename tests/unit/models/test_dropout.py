"""Dropout on a CPU: what is dropped, and what decides that."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finray import compat
from finray.models import dropout as module
from finray.models.dropout import Dropout, drop

SHAPE = (257, 63)


def dropped(p: float, *, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed)
    return drop(torch.ones(SHAPE, dtype=dtype), p)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_that_share_is_dropped_and_the_rest_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    found = dropped(p, dtype=dtype)
    assert found.dtype == dtype
    kept = found != 0
    spread = (p * (1 - p) / kept.numel()) ** 0.5
    assert 1 - kept.float().mean().item() == pytest.approx(p, abs=4 * spread + 1 / 256)
    (value,) = found[kept].double().unique().tolist()
    # A multiple of 1/256 is dropped.
    near = [1 / (1 - part / 256) for part in (math.floor(p * 256), math.ceil(p * 256))]
    assert min(abs(value - one) for one in near) < value * (1e-6 if dtype.itemsize == 4 else 4e-3)


@pytest.mark.parametrize("p", [0.1, 0.0013, 0.9949])
def test_masks_round_the_probability_up_and_down_so_that_it_holds_on_average(p: float) -> None:
    torch.manual_seed(4)
    masks = [drop(torch.ones(64, 64, dtype=torch.float64), p) for _ in range(400)]
    shares = [float((mask == 0).double().mean()) for mask in masks]
    # Of the rounding and of the elements.
    rounding = math.sqrt((part := p * 256 % 1) * (1 - part)) / 256
    spread = math.sqrt((rounding**2 + p * (1 - p) / 64**2) / len(masks))
    assert statistics.mean(shares) == pytest.approx(p, abs=4 * spread)
    assert len({float(mask.max()) for mask in masks}) == 2, "of each mask, the kept elements are equal"
    assert statistics.mean(float(mask.mean()) for mask in masks) == pytest.approx(1, abs=0.05)


def test_elements_are_dropped_independently_of_their_neighbours_and_of_other_draws() -> None:
    """No row, column, distance or second mask has more in common than chance allows."""
    torch.manual_seed(1)
    first, second = ((drop(torch.ones(512, 512), 0.3) != 0).double() - 0.7 for _ in range(2))
    spread = 0.3 * 0.7 / 512
    for other in (second, *(first.flatten().roll(distance).view(512, 512) for distance in (1, 2, 3, 4, 512))):
        assert abs((first * other).mean().item()) < 4.5 * spread
    by_row = (0.3 * 0.7 / 512) ** 0.5
    assert max(first.mean(0).abs().max().item(), first.mean(1).abs().max().item()) < 4.5 * by_row


def test_the_gradient_is_that_of_what_was_kept() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    torch.manual_seed(3)
    found = drop(x, 0.4)
    (grad,) = torch.autograd.grad((found * 3).sum(), x)
    torch.testing.assert_close(grad * x.detach(), found.detach() * 3)
    assert (grad == 0).sum() == (found == 0).sum()


def test_the_seed_of_torch_decides_and_nothing_else() -> None:
    first = dropped(0.5)
    np.random.seed(9)
    assert torch.equal(first, dropped(0.5))
    assert not torch.equal(first, dropped(0.5, seed=8))
    torch.manual_seed(7)
    assert torch.equal(first, drop(torch.ones(SHAPE), 0.5))
    # The next one is another.
    assert not torch.equal(first, drop(torch.ones(SHAPE), 0.5))


def test_a_recomputed_forward_pass_drops_the_same() -> None:
    x, layer = torch.randn(64, 32, requires_grad=True), torch.nn.Linear(32, 32)

    def block(x: torch.Tensor) -> torch.Tensor:
        return drop(layer(drop(x, 0.3)).tanh(), 0.3).square()

    grads = []
    for recomputed in (False, True):
        torch.manual_seed(5)
        result = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        grads.append(torch.autograd.grad(result.sum(), [x, layer.weight]))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1e-9, 1.0), (1.0, 0.0), (1 - 1e-12, 0.0)])
def test_nothing_and_everything_can_be_dropped(p: float, share: float) -> None:
    found = dropped(p)
    assert torch.equal(found, torch.full(SHAPE, share))


def test_other_kinds_of_tensors_take_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain: Callable[..., torch.Tensor] = F.dropout

    def torchs(x: torch.Tensor, p: float) -> torch.Tensor:
        asked.append(type(x).__name__)
        return plain(x, p)

    monkeypatch.setattr(module.F, "dropout", torchs)
    assert drop(torch.ones(3, device="meta"), 0.5).shape == (3,)
    with compat.fake_tensors():
        assert drop(torch.ones(3), 0.5).shape == (3,)
    assert asked == ["Tensor", "FakeTensor"]


def test_the_modules_of_a_model_are_replaced_in_place() -> None:
    inner = torch.nn.ModuleDict({"one": torch.nn.Dropout(0.25), "other": torch.nn.Dropout1d(0.5)})
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), inner, torch.nn.Dropout(0.5, inplace=True))
    module.apply(model)
    assert [type(one) for one in (model[0], inner["one"], inner["other"], model[2])] == [
        *(Dropout, Dropout, torch.nn.Dropout1d, torch.nn.Dropout)
    ]
    one = copy.deepcopy(inner["one"])
    x = torch.ones(SHAPE)
    torch.manual_seed(7)
    assert torch.equal(one(x), dropped(0.25))
    assert one.eval()(x) is x
