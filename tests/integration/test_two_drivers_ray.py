"""Two trainings at once on one cluster, with one directory for their prepared data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forks, runs

pytestmark = pytest.mark.nightly


def written(folder: Path) -> dict[Path, int]:
    """When each file of rows was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.arrow")}


@pytest.mark.parametrize("workers", [1, 2])
def test_two_drivers_share_a_cluster_and_a_prepared_dataset(
    workers: int, tiny_run: Callable[..., runs.Plain], ray_cluster: str, tmp_path: Path
) -> None:
    """Each learns what it would alone, one of them prepares, and a third that comes later finds it prepared."""
    prepared = tmp_path / "prepared"
    plain = tiny_run({"train.max_steps": 6, "prepare.dir": str(prepared), "cluster.num_workers": workers}, rows=24)
    rates = {"first": 0.01, "second": 0.02}
    files = {}
    for name, rate in rates.items():
        own = runs.changed(plain, {"run.name": name, "train.learning_rate": rate})
        files[name] = runs.write_config(own, tmp_path / f"{name}.yaml")
    commands = {name: forks.Command("train", file) for name, file in files.items()}
    said = {name: command.communicate(timeout=runs.PATIENCE_S) for name, command in commands.items()}
    assert {name: command.returncode for name, command in commands.items()} == dict.fromkeys(rates, 0), said
    found = [path for path in prepared.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert len(found) == 1, found
    output = Path(plain["run"]["output_dir"])
    for name, rate in rates.items():
        alone = runs.changed(plain, {"train.learning_rate": rate, "prepare.dir": str(tmp_path / "other")})
        runs.run_alone(alone, tmp_path / f"{name}-alone")
        runs.assert_same_curve(output / name, tmp_path / f"{name}-alone")
    assert runs.values(output / "first", "loss") != runs.values(output / "second", "loss")
    before = written(found[0])
    third = runs.write_config(runs.changed(plain, {"run.name": "third", "train.max_steps": 1}), tmp_path / "third.yaml")
    code, out, err = forks.finray("train", third)
    assert code == 0, out + err
    assert written(found[0]) == before
