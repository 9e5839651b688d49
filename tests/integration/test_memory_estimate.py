"""The estimate of a worker's memory, beside the measured peak of real runs in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finray.hardware import cpu_has_bf16

# Quick ones of the benchmark's settings: all weights of a small model, two workers, with shares and without, weights in
# bf16 alone, and an adapter on the real one.
CASES = ["two-layers-full-2-workers", "wide-bf16-true", "smollm2-lora-checkpointing", "fsdp-full-2-workers"]
_CHEAPER: dict[str, dict[str, Any]] = {
    # Products in bf16 take ten times as long on CPUs that have no instructions for them.
    **({} if cpu_has_bf16() else {"wide-bf16-true": {"max_length": 64, "rows": 2}}),
    "smollm2-lora-checkpointing": {"precision": "fp32", "max_length": 128, "rows": 4},
    # Two steps under FSDP, which takes long to gather: in the second all is there that there will be.
    "fsdp-full-2-workers": {"rows": 8},
}
# The median of three counts. Two workers under DDP hold a bucket of gradients at their peak or do not: 925 to 1100 MiB
# were seen. Six runs with weights in bf16 took 1,357 to 1,718 MiB.
_VARIES = ("two-layers-full-2-workers", "wide-bf16-true")
_DONE: dict[str, dict[str, Any]] = {}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the process and its heap are Linux's")


@pytest.fixture
def measured(benchmark_module: Callable[[str], Any], smollm2_dir: Path, tmp_path: Path) -> Callable[[str], Any]:
    """A setting of the benchmark: estimate, measurement, and the parts of the estimate, in bytes."""

    def measure(case: str) -> dict[str, Any]:
        if case not in _DONE:
            memory, bench = benchmark_module("memory"), benchmark_module("case").Bench
            setting = next(one for one in memory.SETTINGS if one.name == case)
            setting = replace(setting, **_CHEAPER.get(case, {}))
            runs: list[dict[str, Any]] = []
            while len(runs) < (3 if case in _VARIES else 1):
                folder = tmp_path / str(len(runs))
                folder.mkdir()
                runs.append(memory.measure(bench(model=smollm2_dir, folder=folder, peer_python=""), setting))
            _DONE[case] = sorted(runs, key=lambda run: float(run["measured"]))[len(runs) // 2]
        return _DONE[case]

    return measure


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_15_percent(measured: Callable[[str], Any], case: str) -> None:
    result = measured(case)
    assert result["estimate"] == sum(result["parts"].values())
    assert abs(result["estimate"] / result["measured"] - 1) <= 0.15


def test_state_that_is_forgotten_would_be_seen(measured: Callable[[str], Any]) -> None:
    result = measured("fsdp-full-2-workers")
    without = result["estimate"] - result["parts"]["optimizer"] - result["parts"]["gradients"]
    assert without / result["measured"] < 0.85


def test_shares_that_are_not_shared_would_be_seen(measured: Callable[[str], Any]) -> None:
    """Two workers under FSDP have half of weights, gradients and optimizer state each, and are measured to."""
    result = measured("fsdp-full-2-workers")
    state = sum(result["parts"][part] for part in ("weights", "gradients", "optimizer"))
    assert (result["estimate"] + state) / result["measured"] > 1.4


def test_an_fp32_copy_of_the_weights_would_be_seen(measured: Callable[[str], Any]) -> None:
    """Weights, gradients and moments are in bf16, and are measured to take no more."""
    result = measured("wide-bf16-true")
    state = sum(result["parts"][part] for part in ("weights", "gradients", "optimizer"))
    assert (result["estimate"] + state) / result["measured"] > 1.1
