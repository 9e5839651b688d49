"""Attention of short rows by blocks, against torch's own of each row alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from finray.models import attention, short_rows

# None of the first is a multiple of a block; the others end with one, or one token behind it.
LENGTHS = [(1,), (7, 130, 3), (128, 256), (129, 300)]


def inputs(heads: int, shared: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, tokens, count, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, shared, shared)
    ]


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    rows = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outputs = [F.scaled_dot_product_attention(*row, is_causal=True, scale=0.3, enable_gqa=grouped) for row in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def with_gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [output, *torch.autograd.grad(output.double().sin().sum(), tensors)]


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_blocks_are_causal_attention(
    heads: int, shared: int, lengths: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    tensors = inputs(heads, shared, sum(lengths), dtype)
    ours = with_gradients(short_rows.attend(*tensors, lengths, 0.3), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = with_gradients(reference(*exact, lengths), exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine, other) < tolerance


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected; a row of one token has no gradient at all."""
    expected = expected.detach()
    return float((actual.detach().double() - expected).norm() / expected.norm().clamp_min(1.0))


def test_in_bf16_it_is_exact_but_for_the_rounding_of_each_product() -> None:
    lengths = (300, 129)
    tensors = inputs(6, 2, sum(lengths), torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = with_gradients(reference(*exact, lengths), exact)
    ours = with_gradients(short_rows.attend(*tensors, lengths, 0.3), tensors)
    for mine, expected in zip(ours, theirs, strict=True):
        assert relative(mine, expected) < 2**-7


def test_rows_too_long_for_it_go_another_way_in_the_same_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (5, 40, 9)
    tensors = inputs(4, 2, sum(lengths), torch.bfloat16)
    whole = attention.packed_attention(torch.nn.Identity(), *tensors, None, scaling=0.3, segment_lengths=lengths)[0]
    monkeypatch.setattr(attention, "EXPLICIT_UP_TO", 20)
    asked: list[tuple[int, ...]] = []
    inner = short_rows.attend

    def attend(*arguments: object) -> torch.Tensor:
        asked.append(arguments[3])  # type: ignore[arg-type]
        return inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(short_rows, "attend", attend)
    mixed = attention.packed_attention(torch.nn.Identity(), *tensors, None, scaling=0.3, segment_lengths=lengths)[0]
    assert asked == [(5,), (9,)]
    assert mixed.shape == whole.shape
    assert relative(mixed, whole.double()) < 2**-7


def test_weights_of_later_blocks_alone_span_the_row() -> None:
    assert [short_rows.kept_weights(length) for length in (1, 128, 129, 256)] == [1, 128**2, 128**2 + 129, 128 * 384]
