"""Layers that are really compiled, with their weights gathered and computed again: the curve of a plain process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.group import run_group
from tests.support.runs import Plain, changed


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is none")
def test_compiled_layers_give_the_same_curve(tmp_path: Path, tiny_run: Callable[..., Plain]) -> None:
    # Without an adapter all layers are alike, and are compiled once.
    plain = tiny_run({"adapter.method": "none", "train.max_steps": 4, "train.learning_rate": 0.002}, rows=24)
    runs.run_alone(plain, tmp_path / "one")
    fast = {"train.compile": True, "train.gradient_checkpointing": "full", "parallel.strategy": "fsdp"}
    run_group(changed(plain, fast), tmp_path / "shared", world_size=1)
    runs.assert_same_curve(tmp_path / "shared", tmp_path / "one")
