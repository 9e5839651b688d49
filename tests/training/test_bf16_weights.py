"""Weights in bf16 without an fp32 copy: the curve is that of fp32 weights, because updates are rounded by chance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finray.training.optim import rounded_adamw
from tests.support import runs
from tests.support.runs import Plain, changed

TRUE = {"train.precision": "bf16-true"}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    """All weights, at a rate so small that rounding to the nearest loses most updates."""
    train = {"precision": "bf16", "learning_rate": 2e-5, "max_steps": 40, "schedule": "constant", "adam_beta2": 0.99}
    changes = {"adapter.method": "none", "train": train, "checkpoint.every_steps": 20, "data.packing": False}
    return tiny_run(changes, rows=12, model=dropout_model)


def to_the_nearest(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    return values


def learned(run_dir: Path) -> float:
    """How far the loss has come: the mean of the last steps below that of the first."""
    losses = runs.values(run_dir, "loss")
    return sum(losses[:3]) / 3 - sum(losses[-3:]) / 3


def test_the_curve_is_that_of_fp32_weights_and_rounding_to_the_nearest_stalls(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.run_alone(plain, tmp_path / "fp32")
    runs.run_alone(changed(plain, TRUE), tmp_path / "true")
    monkeypatch.setattr(rounded_adamw, "rounded", to_the_nearest)
    runs.run_alone(changed(plain, TRUE), tmp_path / "nearest")
    gain = {name: learned(tmp_path / name) for name in ("fp32", "true", "nearest")}
    for name in ("fp32", "true"):
        kept = load_file(tmp_path / name / "checkpoint-000040" / "model.safetensors")
        assert {one.dtype for one in kept.values()} == {torch.float32 if name == "fp32" else torch.bfloat16}
    assert runs.values(tmp_path / "true", "samples") == runs.values(tmp_path / "fp32", "samples")
    assert runs.values(tmp_path / "true", "loss") == pytest.approx(runs.values(tmp_path / "fp32", "loss"), rel=0.01)
    assert gain["true"] == pytest.approx(gain["fp32"], rel=0.1)
    assert gain["nearest"] < 0.5 * gain["fp32"]


def test_it_resumes_to_the_bit(plain: Plain, tmp_path: Path) -> None:
    short = changed(plain, TRUE, {"train.max_steps": 8, "checkpoint.every_steps": 4})
    runs.run_alone(short, tmp_path / "whole")
    run_dir = runs.cut(tmp_path / "whole", tmp_path / "cut")
    assembled = runs.run_alone(short, run_dir)
    assert assembled.header.precision == "bf16-true"
    assert runs.trace(run_dir) == runs.trace(tmp_path / "whole")
    last = "checkpoint-000008"
    for name in ("model.safetensors", "training_state/optimizer-00001-of-00001.safetensors"):
        assert (run_dir / last / name).read_bytes() == (tmp_path / "whole" / last / name).read_bytes()
    # Another seed rounds otherwise.
    runs.run_alone(changed(short, {"run.seed": 6, "data.eval_ratio": 0.0}), tmp_path / "other")
    assert runs.values(tmp_path / "other", "loss") != runs.values(tmp_path / "whole", "loss")
