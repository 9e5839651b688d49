"""Ctrl-C and SIGTERM in a whole run: a checkpoint, one line, the exit code, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import forks, gated, runs
from tests.support.gated import allow
from tests.support.group import run_group
from tests.support.runs import Plain

STEPS = 40


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    """Two workers with dropout on; no checkpoint is due before the last step."""
    changes = {"train.max_steps": STEPS, "adapter.dropout": 0.2, "checkpoint.every_steps": 1000}
    return tiny_run(changes | {"cluster.num_workers": 2}, rows=50, model=dropout_model)


def interrupt(process: subprocess.Popen[str] | forks.Command, signum: int) -> str:
    """Send a signal; the line that says that it came."""
    process.send_signal(signum)
    assert process.stdout is not None
    while "saving a checkpoint" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    return line


def ended(process: subprocess.Popen[str] | forks.Command) -> tuple[int | None, list[str]]:
    """Wait for the end; the exit code, and the lines of standard error."""
    _, err = process.communicate(timeout=runs.PATIENCE_S)
    return process.returncode, err.strip().splitlines()


def is_there(process: psutil.Process) -> bool:
    """Whether it has not ended; nobody may ask for the exit code of one that has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_run_that_is_stopped_by_either_signal_goes_on_to_the_same_bits(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    """Of a cluster that is joined: it keeps nothing of the run, so its CPUs are free."""
    import ray

    changes = {"cluster.requeue_exit_code": 75}
    config, run_dir = runs.into(gated.gated(plain, tmp_path), tmp_path, changes), tmp_path / "run"
    # SIGTERM has the exit code that a scheduler is given.
    for signum, code, step, word in (
        (signal.SIGINT, 130, 8, "interrupted"),
        (signal.SIGTERM, 75, 25, "ended by SIGTERM"),
    ):
        allow(tmp_path, step)
        process = forks.Command("train", config)
        runs.wait_for_step(run_dir, step, process)
        interrupt(process, signum)
        allow(tmp_path, STEPS)
        found = ended(process)
        saved = f"checkpoint-{runs.values(run_dir, 'step')[-1]:06d}"
        assert (run_dir / saved).is_dir()
        assert found == (code, [f"{word}; {saved} is saved; the same command continues: finray train {config}"])
        assert not list(run_dir.glob(".tmp-*"))
        assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    code, out, stderr = runs.finray("train", config)
    assert code == 0, out + stderr
    undisturbed = tmp_path / "undisturbed"
    run_group(plain, undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)
    name = "adapter_model.safetensors"
    assert (run_dir / "final" / name).read_bytes() == (undisturbed / f"checkpoint-{STEPS:06d}" / name).read_bytes()


def test_a_stopped_run_with_a_ray_of_its_own_leaves_no_process(plain: Plain, tmp_path: Path) -> None:
    changes = {"cluster.num_workers": 1, "cluster.dashboard": True}
    config = runs.into(gated.gated(plain, tmp_path), tmp_path, changes)
    allow(tmp_path, 4)
    home = tmp_path / "home"
    home.mkdir()
    env = {"RAY_ADDRESS": None, "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(home / ".ray" / "auth_token")}
    process = runs.start_cli("train", str(config), env=env)
    assert process.stdout is not None
    while "Ray's dashboard is at " not in (line := process.stdout.readline()):
        assert line, process.communicate()
    url = line.split()[-1]
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/api/jobs/", timeout=60)
    token = (home / ".ray" / "auth_token").read_text(encoding="utf-8")
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    asked = urllib.request.Request(f"{url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(url, timeout=60) as page:
        assert "<title>Ray Dashboard" in page.read().decode()
    runs.wait_for_step(tmp_path / "run", 4, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 3
    interrupt(process, signal.SIGTERM)
    allow(tmp_path, STEPS)
    code, err = ended(process)
    assert (code, len(err)) == (143, 1), err
    assert "is saved" in err[0]
    runs.wait_until(lambda: not any(map(is_there, family)))


def test_two_ctrl_c_end_at_once_and_say_what_there_is(plain: Plain, tmp_path: Path, ray_cluster: str) -> None:
    """The workers are stopped, as if they hung: no checkpoint can be waited for."""
    changes = {"cluster.num_workers": 1, "checkpoint.grace_seconds": 37}
    config, run_dir = runs.into(gated.gated(plain, tmp_path), tmp_path, changes), tmp_path / "run"
    allow(tmp_path, 2)
    process = forks.Command("train", config)
    runs.wait_for_step(run_dir, 2, process)
    (worker,) = [psutil.Process(one["pid"]) for one in runs.read_workers(run_dir)]
    worker.suspend()
    assert "for at most 37 s" in interrupt(process, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, err = ended(process)
    assert (code, len(err)) == (130, 1), err
    assert err[0].startswith("interrupted; no checkpoint has been saved yet; the same command continues: ")
    worker.wait(runs.PATIENCE_S)


def test_a_signal_while_rays_core_starts_is_one_line(plain: Plain, tmp_path: Path, ray_cluster: str) -> None:
    config = runs.into(plain, tmp_path)
    script = """
import atexit, os, signal, sys
import ray._raylet

# Ray's core now and then crashes while a process ends that was interrupted in this moment.
atexit.register(os._exit, 99)
real = ray._raylet.CoreWorker

def signalled(*given, **named):
    core = real(*given, **named)
    os.kill(os.getpid(), signal.SIGTERM)
    return core

ray._raylet.CoreWorker = signalled
from finray.cli.start import main
main()
"""
    command = [sys.executable, "-c", script, "plan", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=runs.PATIENCE_S)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    # Ray's core speaks first where the signal came to another thread, in C++.
    assert done.stderr.splitlines()[-1] == f"ended by SIGTERM; the same command starts over: finray plan {config}"
    assert "Traceback" not in done.stderr
