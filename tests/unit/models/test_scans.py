"""Scans of packed rows are the recurrences that they stand for, of each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from finray.models import scans

# One token; less than a chunk, a whole one, one more; several, and rows with as many chunks.
LENGTHS = (1, 7, 32, 33, 100, 70, 64)
KINDS = ["gates", "groups", "gates of channels", "no rule", "groups, no rule"]


def inputs(kind: str) -> list[torch.Tensor]:
    """Query, key, value, decay and, for a delta rule, beta, in float64."""
    torch.manual_seed(0)
    tokens, heads = sum(LENGTHS), 4
    shared = 2 if "groups" in kind else heads
    query, key = torch.randn(2, tokens, shared, 5, dtype=torch.float64)
    value = torch.randn(tokens, heads, 3, dtype=torch.float64)
    decay = -3 * torch.rand(tokens, heads, *[5] * ("channels" in kind), dtype=torch.float64) ** 4
    made = [query, F.normalize(key, dim=-1), value, decay]
    return made if "no rule" in kind else [*made, torch.rand(tokens, heads, dtype=torch.float64)]


def naive(query: Any, key: Any, value: Any, decay: Any, beta: Any = None) -> torch.Tensor:
    """Token after token, as papers write it."""
    groups = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
    start, outputs = 0, []
    for length in LENGTHS:
        state = torch.zeros(value.shape[1], key.shape[2], value.shape[2], dtype=value.dtype)
        for at in range(start, start + length):
            state = decay[at].exp().view(*decay.shape[1:], *[1] * (4 - decay.ndim)) * state
            written = value[at]
            if beta is not None:
                written = beta[at][:, None] * (written - torch.einsum("hk,hkv->hv", key[at], state))
            state = state + key[at][:, :, None] * written[:, None]
            outputs.append(torch.einsum("hk,hkv->hv", query[at], state))
        start += length
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_is_the_recurrence_and_so_are_its_gradients(kind: str) -> None:
    given = [tensor.requires_grad_() for tensor in inputs(kind)]
    found, expected = scans.scan(LENGTHS, *given), naive(*given)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(expected)
    for actual, wanted in zip(
        *(torch.autograd.grad((each * weights).sum(), given) for each in (found, expected)), strict=True
    ):
        assert torch.allclose(actual, wanted, rtol=1e-9, atol=1e-11)
    # Negative control: rows that are one row are not the same.
    assert not torch.allclose(scans.scan((sum(LENGTHS),), *given), expected, rtol=1e-3)


def test_a_convolution_sees_no_other_row_and_neither_do_its_gradients() -> None:
    torch.manual_seed(0)
    shapes = [(1, 6, sum(LENGTHS)), (6, 4), (6,)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    hidden, weight, bias = given

    def by_rows(rows: tuple[int, ...]) -> torch.Tensor:
        padded = [F.pad(row, (3, 0)) for row in torch.split(hidden, rows, dim=2)]
        sums = [
            sum(weight[:, at, None] * row[..., at : row.shape[2] - 3 + at] for at in range(4)) + bias[:, None]
            for row in padded
        ]
        return F.silu(torch.cat(sums, dim=2))

    found, expected = scans.convolution(LENGTHS, hidden, weight, bias, "silu"), by_rows(LENGTHS)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((each * weights).sum(), given) for each in (found, expected)]
    for actual, wanted in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-10, atol=1e-11)
    # Negative control: rows that are one row are not the same.
    assert not torch.allclose(by_rows((sum(LENGTHS),)), expected, rtol=1e-3)
