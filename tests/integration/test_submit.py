"""`finray submit` to a real job server of Ray: detached, stopped, continued, followed; and what is refused."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks, gated, job_server, runs
from tests.support.gated import allow
from tests.support.runs import Plain

STEPS = 24
SECRET = "a-secret-that-is-nowhere-to-be-read"
# What the job gets by --code: read by the driver, by tasks that prepare, and by workers.
CODE = """
class LossFile:
    def start(self, run):
        self._file = run.run_dir / "losses.txt"
        self._file.write_text(f"{__file__}\\n")

    def log(self, record):
        with self._file.open("a") as stream:
            stream.write(f"{record.step}\\n")

    def finish(self):
        pass


def convert(row):
    return row
"""


@pytest.fixture(scope="module")
def server(forked: None) -> Iterator[job_server.JobServer]:
    with runs.short_folder() as folder, job_server.serve(folder) as found:
        yield found


def until(what: Callable[[], Any], told: Callable[[], str]) -> Any:
    deadline = time.monotonic() + job_server.PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)
    return found


def test_a_run_is_sent_stopped_and_gone_on_with(
    tiny_run: Callable[..., Plain], tmp_path: Path, server: job_server.JobServer
) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "out" / "run"
    changes = {
        "train.max_steps": STEPS,
        "checkpoint.every_steps": 10_000,
        "cluster.cpus_per_worker": 1,
        "prepare.num_workers": 1,
        "tracking.trackers": ["my_parts.inside:LossFile"],
        "data.converter": "my_parts.inside:convert",
    }
    parts = tmp_path / "code" / "my_parts" / "inside.py"
    parts.parent.mkdir(parents=True)
    parts.write_text(CODE)
    (tmp_path / "code" / ".env").write_text(f"KEY={SECRET}")
    config = runs.write_config(gated.gated(tiny_run(rows=16), output, changes), tmp_path / "run.yaml")
    allow(output, 2)
    env = {**server.env(), "MY_SECRET": SECRET}

    def finray(*words: object) -> tuple[int, str, str]:
        return forks.finray(*words, "--address", server.address, env=env, cwd=tmp_path)

    def logs() -> str:
        return finray("jobs", "logs", job)[1]

    sent = ("--code", parts.parents[1], "--env", "MY_SECRET")
    code, out, err = finray("submit", config, "--detach", *sent)
    assert code == 0, err
    job = out.strip()
    assert job.startswith("finray-run-")
    until(lambda: (run_dir / "metrics.jsonl").exists() and len(runs.values(run_dir, "step")) >= 2, logs)
    # The same command finds the job that is at work, and starts no second one.
    assert finray("submit", config, "--detach", *sent)[1].strip() == job
    code, out, _ = finray("jobs", "list", "--json")
    assert code == 0
    (listed,) = json.loads(out)["jobs"]
    assert (listed["id"], listed["run"], listed["status"]) == (job, str(run_dir), "running")

    code, out, err = finray("jobs", "stop", job)
    assert code == 0, err
    # Its steps go on when the signal has come.
    until(lambda: "saving a checkpoint" in logs(), logs)
    allow(output, STEPS)
    until(lambda: json.loads(finray("jobs", "list", "--json")[1])["jobs"][0]["status"] == "stopped", logs)
    steps = runs.values(run_dir, "step")
    assert len(steps) < STEPS
    assert (run_dir / f"checkpoint-{steps[-1]:06d}" / "manifest.json").is_file(), logs()
    first_log = logs()
    assert "is saved; the same command continues: finray submit" in first_log

    code, out, err = finray("submit", config, *sent)
    assert code == 0, out + err
    assert (run_dir / "final" / "adapter_model.safetensors").is_file(), out
    assert runs.values(run_dir, "step") == list(range(1, STEPS + 1))
    # A worker's directory is what Ray has sent to its machine: the code alone, without the secrets of the job.
    module, *seen = (run_dir / "losses.txt").read_text().split()
    assert Path(module).parents[1].name.startswith("_ray_pkg_")
    assert seen == [str(number) for number in range(len(steps) + 1, STEPS + 1)]
    # Neither what was printed nor what Ray wrote down has the secret, and no file of the job keeps it.
    assert SECRET not in first_log + out + err
    assert runs.files_with(server.folder, SECRET.encode()) == []


def test_a_server_without_the_token_is_said(server: job_server.JobServer, tmp_path: Path) -> None:
    words = ("jobs", "list", "--address", server.address)
    env: dict[str, str | None] = {"RAY_ADDRESS": None, "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}
    code, _, err = forks.finray(*words, env=env | {"HOME": str(tmp_path)})
    assert code == 2
    assert "requires a token, and none was sent" in err
    code, _, err = forks.finray(*words, env=env | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    assert code == 2
    assert "the one that was sent is wrong" in err
    code, _, err = forks.finray("jobs", "logs", "no-such-job", "--address", server.address, env=server.env())
    assert code == 2
    assert "there is no job `no-such-job`" in err


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_server_at_the_address_is_an_error_and_no_wait(answers: bool, forked: None) -> None:
    """Nobody listens; or somebody does, and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answers:
            listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        code, _, err = forks.finray("submit", "smollm2-lora", "--address", address, env={"RAY_ADDRESS": None})
    assert code == 2
    assert f"--address http://{address}: there is no job server" in err
