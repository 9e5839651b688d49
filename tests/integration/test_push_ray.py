"""`finray train` that pushes: its checkpoints from a worker of Ray, and the finished model at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.config.adapter_files import WEIGHTS
from tests.support import hub as hubs
from tests.support import runs


def train(plain: runs.Plain, folder: Path, hub: hubs.Hub, **changed: str | None) -> tuple[int, str, str]:
    """In a process and on a Ray of its own, whose environment names the Hub."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(plain), encoding="utf-8")
    env = {**hubs.environment(hub, folder / "home"), "RAY_ADDRESS": None, "TMPDIR": None, **changed}
    return runs.cli("train", str(file), env=env)


@pytest.fixture
def plain(tiny_run: Callable[..., runs.Plain]) -> runs.Plain:
    export = {"push_to_hub": "ada/poems", "push_every_checkpoint": True, "base_model": "acme/tiny-llama"}
    return tiny_run({"train.max_steps": 4, "checkpoint.every_steps": 2, "export": export}, rows=16)


def test_a_training_pushes_and_keeps_the_token_to_itself(plain: runs.Plain, tmp_path: Path) -> None:
    run = Path(plain["run"]["output_dir"]) / "run"
    with hubs.serve() as hub:
        # What will be refused is refused before anything is done.
        hub.role = "read"
        code, out, err = train(plain, tmp_path, hub)
        assert code == 2, out + err
        assert "may read, and not write" in out + err
        assert not run.exists()
        hub.role = "write"
        # The Hub is down when the run ends: the run is finished, and the same command finishes the push.
        fault = hub.fail("POST", "validate-yaml", times=10**6, status=403, said="not now")
        code, out, err = train(plain, tmp_path, hub)
        assert code == 2, out + err
        assert f"the run is finished, and its model is in {run / 'final'}" in out + err
        assert (run / "summary.json").is_file()
        repo = hub.repos["ada/poems"]
        assert repo.private
        assert "Checkpoint of step 4" in repo.commits
        assert repo.files[f"last-checkpoint/{WEIGHTS}"] == (run / "checkpoint-000004" / WEIGHTS).read_bytes()
        assert "README.md" not in repo.files
        fault.times = 0
        code, again, err = train(plain, tmp_path, hub)
        assert code == 0, again + err
        assert f"pushed to {hub.url}/ada/poems" in again + err
        assert repo.files[WEIGHTS] == (run / "final" / WEIGHTS).read_bytes()
        # And then nothing is asked of the Hub any more.
        asked = len(hub.asked)
        assert train(plain, tmp_path, hub)[0] == 0
        assert len(hub.asked) == asked
    said = (out + again + err).encode()
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    held = [str(path) for path in files if hub.token.encode() in path.read_bytes()]
    assert not held
    assert hub.token.encode() not in said


def test_a_hub_that_is_not_there_stops_a_training_before_it_starts(plain: dict[str, Any], tmp_path: Path) -> None:
    with hubs.serve() as hub:
        env = {"HF_TOKEN": None, "HF_HOME": str(tmp_path / "nobody")}
        code, out, err = train(plain, tmp_path, hub, **env)
    assert code == 2, out + err
    assert "there is no token to push with" in out + err
    assert not (Path(plain["run"]["output_dir"]) / "run").exists()
    assert "HF_TOKEN" in out + err
    assert os.environ.get("HF_TOKEN") is None or os.environ["HF_TOKEN"] not in out + err
