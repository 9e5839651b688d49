"""Attention over packed rows refuses what it cannot compute, instead of leaving it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from finray.models.attention import packed_attention


def attend(**options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    return packed_attention(torch.nn.Module(), query, key, value, None, segment_lengths=(2, 4), **options)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"s_aux": torch.ones(2)},
        {"sinks": torch.ones(2)},
        {"position_bias": torch.ones(1, 2, 6, 6)},
        {"head_mask": torch.ones(2)},
        {"is_causal": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_would_change_the_result_are_refused(options: dict[str, Any]) -> None:
    """gpt-oss hands its attention sinks down as ``s_aux``: without them every probability is too large."""
    with pytest.raises(RuntimeError, match=f"wants `{next(iter(options))}`"):
        attend(**options)


def test_arguments_that_change_nothing_are_not() -> None:
    plain = attend()
    harmless = {"position_ids": torch.arange(6)[None], "is_causal": True, "use_cache": False, "s_aux": None}
    assert torch.equal(attend(**harmless), plain)


def eager(*rows: torch.Tensor, window: int | None, softcap: float | None, dropout: float) -> torch.Tensor:
    """Attention as papers write it, over the queries, keys and values (1, heads, L, D) of one row."""
    query, key, value = rows
    scores = query @ key.transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or 1000))
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_window_softcap_and_dropout_are_those_of_the_formula(
    window: int | None, softcap: float | None, dropout: float
) -> None:
    """Row for row, which draw one after the other."""
    torch.manual_seed(0)
    lengths, tensors = (7, 2, 5), torch.randn(3, 1, 4, 14, 8)
    options = {"window": window, "softcap": softcap, "dropout": dropout}
    torch.manual_seed(1)
    parts = [eager(*(one.split(lengths, dim=2)[row] for one in tensors), **options) for row in range(3)]  # type: ignore[arg-type]
    torch.manual_seed(1)
    found, _ = packed_attention(
        torch.nn.Module(),
        *tensors,
        None,
        segment_lengths=lengths,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        dropout=dropout,
    )
    torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-6)
