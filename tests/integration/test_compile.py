"""Layers that are really compiled, with their weights gathered and computed again: the curve of a plain process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs, tiny
from tests.support.group import run_group

TRAIN = {"max_steps": 4, "learning_rate": 0.002}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is none")
def test_compiled_layers_give_the_same_curve(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = tiny.write_chat_rows(tmp_path, 24)
    # Without an adapter all layers are alike, and are compiled once.
    plain: dict[str, Any] = runs.settings(tiny_model_dir, rows, tmp_path, adapter={"method": "none"}, train=TRAIN)
    runs.run_alone(plain, tmp_path / "one")
    fast = {**plain["train"], "compile": True, "gradient_checkpointing": "full"}
    run_group({**plain, "train": fast, "parallel": {"strategy": "fsdp"}}, tmp_path / "shared", world_size=1)
    for key in ("loss", "grad_norm"):
        assert runs.values(tmp_path / "shared", key) == pytest.approx(runs.values(tmp_path / "one", key), rel=1e-4)
