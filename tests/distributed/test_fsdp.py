"""FSDP2 gives the curve of one process, whatever is trained, and its checkpoints are ordinary ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finray.tracking.jsonl import read_records
from tests.support import runs, tiny
from tests.support.group import run_group

FULL = {"adapter": {"method": "none"}, "train": {"learning_rate": 0.002}}
BOTH = pytest.mark.parametrize("extra", [{}, FULL], ids=["lora", "full"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    rows = tiny.write_chat_rows(folder, 37)
    return runs.settings(tiny_model_dir, rows, folder, train={"global_batch_size": 3}, data={"eval_ratio": 0.1})


def with_(plain: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**plain, **{name: {**plain.get(name, {}), **fields} for name, fields in sections.items()}}


def sharded(plain: dict[str, Any]) -> dict[str, Any]:
    return with_(plain, parallel={"strategy": "fsdp"}, checkpoint={"every_steps": 2})


def keep_until(run_dir: Path, step: int) -> None:
    """Forget later checkpoints, as if the run had been killed before them."""
    for path in run_dir.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    assert (run_dir / f"checkpoint-{step:06d}").is_dir()


def same_curve(left: Path, right: Path) -> None:
    for key in ("loss", "grad_norm"):
        assert runs.values(left, key) == pytest.approx(runs.values(right, key), rel=1e-4)
    assert runs.values(left, "samples") == runs.values(right, "samples")


def evaluation(run_dir: Path) -> dict[str, Any]:
    return next(one for one in read_records(run_dir / "metrics.jsonl") if one["kind"] == "eval")


@BOTH
def test_the_curve_is_that_of_one_process(tmp_path: Path, plain: dict[str, Any], extra: dict[str, Any]) -> None:
    one = with_(plain, **extra)
    runs.run_alone(one, tmp_path / "one")
    run_group(sharded(one), tmp_path / "two", world_size=2)
    same_curve(tmp_path / "one", tmp_path / "two")
    expected, found = evaluation(tmp_path / "one"), evaluation(tmp_path / "two")
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert found["eval_targets"] == expected["eval_targets"]


@BOTH
def test_a_run_goes_on_under_another_strategy_and_world_size(
    tmp_path: Path, plain: dict[str, Any], extra: dict[str, Any]
) -> None:
    one = with_(plain, **extra, checkpoint={"every_steps": 2})
    runs.run_alone(one, tmp_path / "one")
    # fsdp on 2, then one process, then fsdp on 3.
    run_group(sharded(one), tmp_path / "moved", world_size=2)
    keep_until(tmp_path / "moved", 2)
    runs.run_alone(one, tmp_path / "moved")
    keep_until(tmp_path / "moved", 4)
    run_group(sharded(one), tmp_path / "moved", world_size=3)
    same_curve(tmp_path / "one", tmp_path / "moved")
    files = {path.name for path in (tmp_path / "moved" / "checkpoint-000008").iterdir()}
    assert ("model.safetensors.index.json" if extra else "adapter_model.safetensors") in files


def test_a_resume_is_exact_to_the_bit(tmp_path: Path, plain: dict[str, Any]) -> None:
    one = sharded(with_(plain, **FULL))
    run_group(one, tmp_path / "undisturbed", world_size=2)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "resumed")
    keep_until(tmp_path / "resumed", 4)
    run_group(one, tmp_path / "resumed", world_size=2)
    assert runs.trace(tmp_path / "resumed") == runs.trace(tmp_path / "undisturbed")


def test_an_8_bit_state_of_one_process_goes_on_in_two(tmp_path: Path, plain: dict[str, Any]) -> None:
    one = with_(plain, **FULL, checkpoint={"every_steps": 4})
    one = with_(one, train={"optimizer": "adamw_8bit"})
    runs.run_alone(one, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    keep_until(tmp_path / "two", 4)
    run_group(sharded(one), tmp_path / "two", world_size=2)
    # Other elements share a scale, so the moments are rounded differently.
    for key in ("loss", "grad_norm"):
        assert runs.values(tmp_path / "two", key) == pytest.approx(runs.values(tmp_path / "one", key), rel=2e-2)
    (file, _) = sorted((tmp_path / "two" / "checkpoint-000008" / "training_state").glob("optimizer-*"))
    kinds = {value.dtype for name, value in load_file(file).items() if name.endswith("mlp.up_proj.weight/state1")}
    assert kinds == {torch.uint8}
