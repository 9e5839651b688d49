"""`finray train` that pushes: its checkpoints from a worker of Ray, and the finished model at the end."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from finray.config.adapter_files import WEIGHTS
from tests.support import hub as hubs
from tests.support import runs


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
    """A Hub, which is this process's own."""
    with hubs.serve() as running:
        hubs.use(running, tmp_path / "home", monkeypatch)
        yield running


@pytest.fixture
def plain(tiny_run: Callable[..., runs.Plain]) -> runs.Plain:
    export = {"push_to_hub": "ada/poems", "push_every_checkpoint": True, "base_model": "acme/tiny-llama"}
    # Each rank writes a part of the optimizer's state, and has a process in which it could push.
    two = {"cluster.num_workers": 2, "parallel.strategy": "fsdp"}
    return tiny_run({"train.max_steps": 4, "checkpoint.every_steps": 2, "export": export, **two}, rows=16)


def test_a_training_pushes_and_keeps_the_token_to_itself(plain: runs.Plain, tmp_path: Path, hub: hubs.Hub) -> None:
    """The training is in a process and on a Ray of its own, whose environment names the Hub; what comes before and
    after it starts no Ray."""
    run, config = Path(plain["run"]["output_dir"]) / "run", runs.write_config(plain, tmp_path / "run.yaml")
    # What will be refused is refused before anything is done.
    hub.role = "read"
    code, out, err = runs.finray("train", config)
    assert code == 2, out + err
    assert "has read access only" in out + err
    assert not run.exists()
    hub.role = "write"
    hub.repos["ada/poems"] = hubs.Repo(True, {"model.safetensors": b"of somebody else"})
    code, out, err = runs.finray("train", config)
    assert code == 2, out + err
    assert "a model that was not pushed by finray" in out + err
    assert not run.exists()
    assert (hub.sent, hub.repos.pop("ada/poems").commits) == (0, [])
    # The Hub is down when the run ends: the run is finished, and the same command finishes the push.
    fault = hub.fail("POST", "validate-yaml", times=10**6, status=403, said="not now")
    env = {**hubs.environment(hub, tmp_path / "home"), "RAY_ADDRESS": None, "TMPDIR": None}
    process = runs.start_cli("train", str(config), env=env)
    commands = set[str]()

    def look() -> None:
        while process.poll() is None:
            commands.update(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
            time.sleep(0.3)

    looking = threading.Thread(target=look)
    looking.start()
    out, err = process.communicate(timeout=600)
    looking.join()
    assert process.returncode == 2, out + err
    # In the list of processes there were Ray's own and the workers, and no token.
    assert any("raylet" in one for one in commands)
    assert any("default_worker.py" in one or "ray::" in one for one in commands)
    assert not [one for one in commands if hub.token in one]
    assert f"the run is finished, and its model is in {run / 'final'}" in out + err
    assert (run / "summary.json").is_file()
    repo = hub.repos["ada/poems"]
    assert repo.private
    # From one of the two ranks, after both have written: once each, or not where the next came first.
    assert repo.commits[-1] == "Checkpoint of step 4"
    assert repo.commits[1:-1] in ([], ["Checkpoint of step 2"])
    assert (hub.count("POST", "repos/create"), hub.count("POST", "/commit/")) == (1, len(repo.commits) - 1)
    last = run / "checkpoint-000004"
    written = {one["path"] for one in json.loads((last / "manifest.json").read_text())["files"]}
    pushed = {name.removeprefix("last-checkpoint/") for name in repo.files if name.startswith("last-checkpoint/")}
    assert pushed == {*written, "manifest.json", "run/config.yaml", "run/resolved.json", "run/run_id"}
    of_ranks = {name for name in pushed if re.search(r"-of-0*2\.", name)}
    assert len(of_ranks) >= 2, pushed
    for name in (WEIGHTS, *of_ranks):
        assert repo.files[f"last-checkpoint/{name}"] == (last / name).read_bytes()
    assert "README.md" not in repo.files
    said = out + err
    fault.times = 0
    code, out, err = runs.finray("train", config)
    assert code == 0, out + err
    assert f"pushed to {hub.url}/ada/poems" in out + err
    assert repo.files[WEIGHTS] == (run / "final" / WEIGHTS).read_bytes()
    # And then nothing is asked of the Hub any more.
    asked = len(hub.asked)
    assert runs.finray("train", config)[0] == 0
    assert len(hub.asked) == asked
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    held = [str(path) for path in files if hub.token.encode() in path.read_bytes()]
    assert not held
    assert hub.token not in said + out + err
