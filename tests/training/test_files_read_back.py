"""What a start reads back: only files that a verified manifest lists, and none that was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finray.checkpoint.pieces import TensorPiece, write_pieces
from finray.checkpoint.rundir import RunDir
from finray.config.paths import with_absolute_paths
from finray.runtime import driver
from tests.support import runs
from tests.support.runs import Plain


def stray_adapter(checkpoint: Path) -> None:
    """Other weights under the same names, in a file that sorts behind the real one."""
    weights = load_file(checkpoint / "adapter_model.safetensors")
    save_file({name: torch.ones_like(one) for name, one in weights.items()}, checkpoint / "adapter_model2.safetensors")


def stray_model(checkpoint: Path) -> None:
    """A single file, which comes before an index; and an index, which comes before nothing."""
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: torch.ones_like(one) for name, one in weights.items()}, checkpoint / "model-2.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-2.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def stray_moments(checkpoint: Path) -> None:
    """The moments of a rank that never was, in front of the real ones."""
    folder = checkpoint / "training_state"
    real = load_file(folder / "optimizer-00001-of-00001.safetensors")
    pieces = [TensorPiece(name, torch.ones_like(one), 0, tuple(one.shape)) for name, one in real.items()]
    write_pieces(folder / "optimizer-00000-of-00001.safetensors", pieces)


@pytest.mark.parametrize(
    ("method", "stray"),
    [("lora", stray_adapter), ("none", stray_model), ("lora", stray_moments)],
    ids=["adapter", "model", "moments"],
)
def test_a_resume_does_not_look_at_files_that_the_manifest_does_not_list(
    method: str, stray: Callable[[Path], None], tiny_run: Callable[..., Plain], tmp_path: Path
) -> None:
    plain = tiny_run({"adapter.method": method, "train.max_steps": 4, "checkpoint.every_steps": 2}, rows=16)
    runs.run_alone(plain, tmp_path / "whole")
    resumed = runs.cut(tmp_path / "whole", tmp_path / "resumed", step=2)
    stray(resumed / "checkpoint-000002")
    runs.run_alone(plain, resumed)
    assert runs.trace(resumed) == runs.trace(tmp_path / "whole")
    shutil.rmtree(resumed)


def test_a_cut_model_is_trained_with_a_warning(
    tiny_model_dir: Path, tiny_run: Callable[..., Plain], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    content = json.loads((model / "config.json").read_text())
    for layers, warned in ((2, False), (1, True)):
        (model / "config.json").write_text(json.dumps(content | {"num_hidden_layers": layers}))
        told: list[Any] = []
        plain = tiny_run({"model.name": str(model)}, rows=8)
        assembled = runs.assemble_alone(plain, tmp_path / str(layers), notify=told.append)
        assembled.loop.writer.close()
        assembled.loop.trackers.finish()
        assert any("a cut model is trained" in getattr(one, "message", "") for one in told) == warned


@pytest.fixture
def finished(tiny_run: Callable[..., Plain], tmp_path: Path) -> tuple[Plain, RunDir]:
    """A finished run of two checkpoints."""
    plain = tiny_run(
        {"run.output_dir": str(tmp_path / "out"), "train.max_steps": 2, "checkpoint.every_steps": 1}, rows=8
    )
    config = with_absolute_paths(runs.config_of(plain))
    run = RunDir.of(config)
    loop = runs.run_alone(plain, run.path).loop
    run.keep_config(config)
    run.finish({"chosen_step": run.make_final(best=None, warn=pytest.fail), "summary": loop.summary().json()})
    return plain, run


def test_train_makes_a_final_model_that_is_gone_again(finished: tuple[Plain, RunDir]) -> None:
    plain, run = finished
    before = {path.name: path.read_bytes() for path in run.final.iterdir()}
    told: list[Any] = []
    for expected in (0, 1):
        if expected:
            shutil.rmtree(run.final)
        result = driver.train(runs.config_of(plain), handle=told.append)
        assert (result.final, result.chosen_step) == (run.final, 2)
        assert {path.name: path.read_bytes() for path in run.final.iterdir()} == before
        assert len([one for one in told if one.level == "warning"]) == expected


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"chosen_step": 2, "summary": {"step": "x"}}'])
def test_a_damaged_summary_is_one_message_of_the_command(
    finished: tuple[Plain, RunDir], content: bytes, tmp_path: Path
) -> None:
    plain, run = finished
    run.summary_file.write_bytes(content)
    code, out, err = runs.finray("train", runs.write_config(plain, tmp_path / "c.yaml"))
    assert code == 2
    assert "Traceback" not in out + err
    assert "delete the file" in out + err
