"""A Ray of its own with a job server, on free ports, that asks for a token; and a task whose steps take a second."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from finray.data.sampling.collate import Batch
from finray.runtime.cluster import LOCAL_RAY
from finray.tasks.causal_lm import CausalLM

ROOT = Path(__file__).parents[2]
PATIENCE_S = 480.0


class SlowLM(CausalLM):
    """A causal language model with steps of a second, until there is a file of the name that FINRAY_TESTS_GO has."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Wait, then as always."""
        if not Path(os.environ["FINRAY_TESTS_GO"]).exists():
            time.sleep(1.0)
        return super().outputs(batch)


@dataclass(frozen=True)
class JobServer:
    """A running one.

    Attributes:
        address: of its dashboard.
        token: that it asks for.
        folder: Ray's files and logs.
    """

    address: str
    token: str
    folder: Path

    def env(self) -> dict[str, str | None]:
        """Of a command that shows the token."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": None}


@contextmanager
def serve(folder: Path) -> Iterator[JobServer]:
    """A job server for as long as the block runs.

    Args:
        folder: for Ray's files; its path is short, because sockets have short names.
    """
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port", "metrics-export-port")
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in names]
        for one in held:
            one.bind(("127.0.0.1", 0))
        ports = {name: one.getsockname()[1] for name, one in zip(names, held, strict=True)}
    token = secrets.token_hex(32)
    own = ("RAY_ADDRESS", "FINRAY_TESTS_FORK", *LOCAL_RAY)
    env = {name: value for name, value in os.environ.items() if name not in own}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_START_HOOK"] = "tests.support.light_ray.with_jobs"
    # Its end need not wait for a node that is idle.
    env |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    # What a person has who starts Ray in an environment with finray; the checkout, whatever the caller's path is.
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
    command += ["--num-cpus=4", "--include-dashboard=true", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1"]
    command += [f"--object-store-memory={128 * 2**20}", *(f"--{name}={port}" for name, port in ports.items())]
    with (folder / "start.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
    try:
        server = JobServer(f"http://127.0.0.1:{ports['dashboard-port']}", token, folder)
        _wait(server, process)
        yield server
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=20)
        for one in alive:
            with suppress(psutil.Error):
                one.kill()
        process.wait()


def _wait(server: JobServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    request = urllib.request.Request(f"{server.address}/api/jobs/", headers={"Authorization": f"Bearer {server.token}"})
    while True:
        with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            if answer.status == 200:
                return
        said = (server.folder / "start.log").read_text()
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
