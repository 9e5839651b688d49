"""The estimate of a worker's memory, beside the measured peak of real runs in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"
# Quick ones of the benchmark's cases: all weights of a small model, two workers, with shares and without, and an
# adapter on the real one.
CASES = ["two-layers-full-2-workers", "smollm2-lora-checkpointing", "fsdp-full-2-workers"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the process and its heap are Linux's")


@cache
def measured(case: str, model: Path) -> dict[str, Any]:
    """A case of the benchmark: estimate, measurement, and the parts of the estimate, in bytes."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), case, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_15_percent(case: str, smollm2_dir: Path) -> None:
    result = measured(case, smollm2_dir)
    assert result["estimate"] == sum(result["parts"].values())
    assert abs(result["estimate"] / result["measured"] - 1) <= 0.15


def test_state_that_is_forgotten_would_be_seen(smollm2_dir: Path) -> None:
    result = measured("fsdp-full-2-workers", smollm2_dir)
    without = result["estimate"] - result["parts"]["optimizer"] - result["parts"]["gradients"]
    assert without / result["measured"] < 0.85


def test_shares_that_are_not_shared_would_be_seen(smollm2_dir: Path) -> None:
    """Two workers under FSDP have half of weights, gradients and optimizer state each, and are measured to."""
    result = measured("fsdp-full-2-workers", smollm2_dir)
    state = sum(result["parts"][part] for part in ("weights", "gradients", "optimizer"))
    assert (result["estimate"] + state) / result["measured"] > 1.4
