"""World size, micro-batch and accumulation change neither what is seen nor what is learned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs, tiny


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """Six packs a step, ten of them in an epoch: epochs end inside steps, and three ranks share them unevenly."""
    folder = tmp_path_factory.mktemp("data")
    rows = tiny.write_chat_rows(folder, 40)
    return runs.settings(
        tiny_model_dir,
        rows,
        folder,
        train={
            "max_steps": 8,
            "global_batch_size": 6,
            "learning_rate": 0.01,
            "precision": "fp32",
            "weight_decay": 0.01,
        },
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, plain: dict[str, Any]) -> Path:
    """One process, one micro-batch a step, without Ray."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    runs.run_alone(with_fields(plain, micro=6), run_dir)
    return run_dir


def with_fields(plain: dict[str, Any], *, micro: int, workers: int = 1, output: Path | None = None) -> dict[str, Any]:
    changed = {
        **plain,
        "train": {**plain["train"], "micro_batch_size": micro},
        "cluster": {**plain["cluster"], "num_workers": workers},
    }
    if output is not None:
        changed["run"] = {**plain["run"], "output_dir": str(output)}
    return changed


def under_ray(plain: dict[str, Any], output: Path) -> Path:
    from finray import train

    return train(runs.config_of({**plain, "run": {**plain["run"], "output_dir": str(output)}})).run_dir


def assert_same_run(actual: Path, expected: Path) -> None:
    assert runs.values(actual, "samples") == runs.values(expected, "samples")
    assert runs.values(actual, "samples_digest") == runs.values(expected, "samples_digest")
    assert runs.values(actual, "loss") == pytest.approx(runs.values(expected, "loss"), rel=1e-5)
    assert runs.values(actual, "grad_norm") == pytest.approx(runs.values(expected, "grad_norm"), rel=1e-4)
    weights = [runs.adapter_weights(path / "checkpoint-000008") for path in (actual, expected)]
    assert runs.relative_difference(*weights) < 1e-5


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_accumulation(plain: dict[str, Any], alone: Path, tmp_path: Path, micro: int) -> None:
    runs.run_alone(with_fields(plain, micro=micro), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(("workers", "micro"), [(1, 2), (2, 1), (2, 3), (3, 4)])
def test_workers(
    plain: dict[str, Any], alone: Path, tmp_path: Path, ray_cluster: str, workers: int, micro: int
) -> None:
    """Three workers and micro-batches of four leave one worker with nothing to do in every step."""
    assert_same_run(under_ray(with_fields(plain, micro=micro, workers=workers), tmp_path), alone)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_one_world_size_resumes_at_another(
    plain: dict[str, Any], alone: Path, tmp_path: Path, ray_cluster: str, first: int, then: int
) -> None:
    run_dir = under_ray(with_fields(plain, micro=1, workers=first), tmp_path)
    for name in ("checkpoint-000008", "final"):
        shutil.rmtree(run_dir / name)
    (run_dir / "summary.json").unlink()
    under_ray(with_fields(plain, micro=2, workers=then), tmp_path)
    assert_same_run(run_dir, alone)


def test_the_comparison_can_fail(plain: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    """Negative control: another seed is another stream."""
    runs.run_alone({**with_fields(plain, micro=6), "run": {**plain["run"], "seed": 6}}, tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "run", alone)


def test_packing_does_not_change_the_loss_of_the_same_rows(plain: dict[str, Any], tmp_path: Path) -> None:
    """A step over all rows gives one gradient, packed or not."""
    everything = {**plain["train"], "max_steps": 2, "global_batch_size": 40, "micro_batch_size": 7}
    unpacked = {**plain, "train": everything, "data": {**plain["data"], "packing": False}}
    runs.run_alone(unpacked, tmp_path / "unpacked")
    packs = runs.assemble_alone(plain, tmp_path / "probe").loop.epoch_items
    packed = {**plain, "train": {**everything, "global_batch_size": packs}}
    runs.run_alone(packed, tmp_path / "packed")
    for key in ("loss", "grad_norm"):
        assert runs.values(tmp_path / "packed", key) == pytest.approx(runs.values(tmp_path / "unpacked", key), rel=1e-5)
