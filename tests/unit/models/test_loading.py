"""What is decided before a model is loaded."""

from __future__ import annotations

import pytest
import torch

from finray.models.loading import resolve_precision


@pytest.mark.parametrize(("hardware", "emulated", "expected"), [(True, True, "bf16"), (False, True, "fp32")])
def test_auto_takes_no_emulated_bf16(
    hardware: bool, emulated: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch emulates bf16 on a T4 or V100, many times slower than fp32."""

    def supported(including_emulation: bool = True) -> bool:
        return emulated if including_emulation else hardware

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert resolve_precision("auto", torch.device("cuda")) == expected
    assert resolve_precision("bf16", torch.device("cuda")) == "bf16"
