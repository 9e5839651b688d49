"""A cluster that somebody else has started: its token, the user's own, and the user's variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.runtime import cluster as clusters
from finray.runtime import driver
from tests.support import forks, runs

NAMES = ("HF_TOKEN", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS")


class Environment:
    """A tracker that writes what of the environment a worker has."""

    def start(self, run: Any) -> None:
        found = {name: os.environ.get(name) for name in NAMES}
        (Path(run.run_dir) / "environment.json").write_text(json.dumps(found))

    def log(self, record: Any) -> None: ...

    def finish(self) -> None: ...


def test_workers_of_a_joined_cluster_get_the_users_token_and_variables(
    tiny_run: Callable[..., runs.Plain], ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_driver")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:256")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    tracker = f"{__name__}:Environment"
    plain = tiny_run({"train.max_steps": 1, "tracking.trackers": [tracker]}, rows=8)
    result = driver.train(runs.config_of(plain))
    assert json.loads((result.run_dir / "environment.json").read_text()) == {
        "HF_TOKEN": "hf_of_the_driver",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256",
        "PYTORCH_ALLOC_CONF": None,
        "OMP_NUM_THREADS": "1",
    }
    (result.run_dir / "environment.json").unlink()
    # Neither what is kept of the run nor a log of Ray's holds the token.
    import ray

    with clusters.connected(runs.config_of(plain).cluster):
        session = ray._private.worker.global_worker.node.get_session_dir_path()
    for folder in (result.run_dir, Path(session) / "logs"):
        assert runs.files_with(folder, b"hf_of_the_driver") == []


def test_a_cluster_that_asks_for_a_token_is_shown_the_users_own(
    tiny_run: Callable[..., runs.Plain], ray_cluster: str, tmp_path: Path
) -> None:
    config = runs.write_config(tiny_run(rows=8), tmp_path / "run.yaml")
    code, out, err = forks.finray("plan", str(config), env={"RAY_AUTH_MODE": None})
    assert (code, err) == (0, "")
    assert f"on {ray_cluster}" in out
    without = {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None, "HOME": str(tmp_path)}
    code, out, _ = forks.finray("plan", str(config), env=without)
    assert code == 2
    assert f"the cluster at {ray_cluster} requires a token, and none was sent" in out
    assert "export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=" in out
    code, out, _ = forks.finray("plan", str(config), env={"RAY_AUTH_TOKEN": "0" * 64})
    assert code == 2
    assert "the one that was sent is wrong" in out
