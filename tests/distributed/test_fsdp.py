"""A run under FSDP2 continues to the bit, and elsewhere: its checkpoints are ordinary. Its curve: test_curves.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import runs
from tests.support.group import run_group
from tests.support.runs import Plain, changed

FULL = {"adapter.method": "none", "train.learning_rate": 0.002}
BOTH = pytest.mark.parametrize("extra", [{}, FULL], ids=["lora", "full"])


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run({"train.global_batch_size": 3, "data.eval_ratio": 0.1}, rows=37)


def sharded(plain: Plain) -> Plain:
    return changed(plain, {"parallel.strategy": "fsdp", "checkpoint.every_steps": 2})


@BOTH
def test_a_run_goes_on_under_another_strategy_and_world_size(
    tmp_path: Path, plain: Plain, extra: dict[str, Any]
) -> None:
    one = changed(plain, extra, {"checkpoint.every_steps": 2})
    runs.run_alone(one, tmp_path / "one")
    # fsdp on 2, then one process, then fsdp on 3.
    run_group(sharded(one), tmp_path / "moved", world_size=2)
    runs.keep_until(tmp_path / "moved", 2)
    runs.run_alone(one, tmp_path / "moved")
    runs.keep_until(tmp_path / "moved", 4)
    run_group(sharded(one), tmp_path / "moved", world_size=3)
    runs.assert_same_curve(tmp_path / "one", tmp_path / "moved")
    files = {path.name for path in (tmp_path / "moved" / "checkpoint-000008").iterdir()}
    assert ("model.safetensors.index.json" if extra else "adapter_model.safetensors") in files


def test_a_resume_is_exact_to_the_bit(tmp_path: Path, plain: Plain) -> None:
    one = sharded(changed(plain, FULL))
    run_group(one, tmp_path / "undisturbed", world_size=2)
    run_group(one, runs.cut(tmp_path / "undisturbed", tmp_path / "resumed"), world_size=2)
    assert runs.trace(tmp_path / "resumed") == runs.trace(tmp_path / "undisturbed")


def test_an_8_bit_state_of_one_process_goes_on_in_two(tmp_path: Path, plain: Plain) -> None:
    one = changed(plain, FULL, {"train.optimizer": "adamw_8bit"})
    runs.run_alone(one, tmp_path / "one")
    run_group(sharded(one), runs.cut(tmp_path / "one", tmp_path / "two"), world_size=2)
    # Other elements share a scale, so the moments are rounded differently.
    for key in ("loss", "grad_norm"):
        assert runs.values(tmp_path / "two", key) == pytest.approx(runs.values(tmp_path / "one", key), rel=2e-2)
    (file, _) = sorted((tmp_path / "two" / "checkpoint-000008" / "training_state").glob("optimizer-*"))
    kinds = {value.dtype for name, value in load_file(file).items() if name.endswith("mlp.up_proj.weight/state1")}
    assert kinds == {torch.uint8}
