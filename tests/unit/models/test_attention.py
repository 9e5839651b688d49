"""Attention over packed rows refuses what it cannot compute, instead of leaving it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
