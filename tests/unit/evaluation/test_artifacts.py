"""What is decided before a model is loaded for inference."""

from __future__ import annotations

import pytest
import torch

from finray.config.resolved import Precision
from finray.evaluation import artifacts
from finray.evaluation.artifacts import inference_dtype

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("hardware", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_no_emulated_bf16_is_taken_unasked(
    hardware: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch emulates bf16 on a T4 or V100, many times slower than fp32."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or hardware
    )
    monkeypatch.setattr(artifacts, "cpu_has_bf16", lambda: hardware)
    assert inference_dtype(None, CUDA) == inference_dtype(None, CPU) == expected
    assert inference_dtype("bf16", CPU) == expected
    assert inference_dtype("bf16", CUDA) == torch.bfloat16


@pytest.mark.parametrize(("precision", "on_cpu"), [("fp32", torch.float32), ("fp16", torch.float32)])
def test_a_cpu_takes_fp32_for_what_it_would_emulate(precision: Precision, on_cpu: torch.dtype) -> None:
    assert inference_dtype(precision, CPU) == on_cpu
