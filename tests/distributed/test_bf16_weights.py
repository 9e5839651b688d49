"""Weights in bf16 alone train alike on one process, on two, and on two that share them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import runs
from tests.support.group import run_group
from tests.support.runs import Plain, changed


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in checkpoint.glob("model*.safetensors") for name, one in load_file(file).items()}


def test_the_curve_is_that_of_one_process_and_goes_on_under_another_strategy(
    tmp_path: Path, tiny_run: Callable[..., Plain]
) -> None:
    train = {"precision": "bf16-true", "learning_rate": 1e-4, "max_steps": 6, "schedule": "constant"}
    one = tiny_run({"adapter.method": "none", "train": train, "checkpoint.every_steps": 2}, rows=20)
    runs.run_alone(one, tmp_path / "one")
    run_group(one, tmp_path / "ddp", world_size=2)
    shared = changed(one, {"parallel.strategy": "fsdp"})
    run_group(shared, tmp_path / "fsdp", world_size=2)
    runs.keep_until(tmp_path / "ddp", 4)
    run_group(shared, tmp_path / "ddp", world_size=2)
    first, last = (weights(tmp_path / "one" / f"checkpoint-00000{step}") for step in (2, 6))
    assert all(one.dtype == torch.bfloat16 for one in last.values())
    for name in ("ddp", "fsdp"):
        # Gradients are rounded to bf16 before they are summed.
        for key, rel in (("loss", 0.003), ("grad_norm", 0.05)):
            assert runs.values(tmp_path / name, key) == pytest.approx(runs.values(tmp_path / "one", key), rel=rel)
        assert runs.values(tmp_path / name, "samples") == runs.values(tmp_path / "one", "samples")
        off = runs.relative_difference(last, weights(tmp_path / name / "checkpoint-000006"))
        assert off < 0.3 * runs.relative_difference(last, first), "what differs is small beside what was learned"
