"""World size, micro-batch and accumulation change neither what is seen nor what is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finray import train
from tests.support import runs
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    """Six packs a step, ten of them in an epoch: epochs end inside steps, and three ranks share them unevenly."""
    return tiny_run({"train.global_batch_size": 6, "train.weight_decay": 0.01}, rows=40)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    """One process, one micro-batch a step, without Ray."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    runs.run_alone(with_micro(plain, 6), run_dir)
    return run_dir


def with_micro(plain: Plain, micro: int) -> Plain:
    return changed(plain, {"train.micro_batch_size": micro})


def assert_same_run(actual: Path, expected: Path) -> None:
    assert runs.values(actual, "samples") == runs.values(expected, "samples")
    assert runs.values(actual, "samples_digest") == runs.values(expected, "samples_digest")
    assert runs.values(actual, "loss") == pytest.approx(runs.values(expected, "loss"), rel=1e-5)
    assert runs.values(actual, "grad_norm") == pytest.approx(runs.values(expected, "grad_norm"), rel=1e-4)
    weights = [runs.adapter_weights(path / "checkpoint-000008") for path in (actual, expected)]
    assert runs.relative_difference(*weights) < 1e-5


def test_a_run_under_ray_goes_on_at_other_world_sizes(
    plain: Plain, alone: Path, tmp_path: Path, ray_cluster: str
) -> None:
    """Two workers, then one, then three, each from step 4 of the one before, and with another micro-batch."""
    run_dir = tmp_path / "run"
    for workers, micro in ((2, 1), (1, 2), (3, 4)):
        if run_dir.exists():
            runs.reopen(run_dir, step=4)
        here = {"run.output_dir": str(tmp_path), "cluster.num_workers": workers}
        train(runs.config_of(changed(with_micro(plain, micro), here)))
        assert_same_run(run_dir, alone)


def test_the_comparison_sees_another_seed(plain: Plain, alone: Path, tmp_path: Path) -> None:
    """Negative control: another seed is another stream."""
    runs.run_alone(changed(with_micro(plain, 6), {"run.seed": 6}), tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "run", alone)
