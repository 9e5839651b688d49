"""Servers of other projects, each on a free port and in a directory of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Far more than a server takes to start.
LIMIT_S = 240.0


class Server:
    """An MLflow server, which can be stopped and started again on the same port with what it knows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Held, so that nobody else gets the port while the server is stopped; nobody listens.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self._folder / "log").open("ab")
        code = "import sys; from tests.services.conftest import serve; serve(sys.argv[1], int(sys.argv[2]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(self._folder), str(self.port)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                text = (self._folder / "log").read_text(errors="replace")
                assert self._process.poll() is None, text
                assert time.monotonic() < until, text
                time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()


def serve(folder: str, port: int) -> None:
    """MLflow's own application in one process, as `mlflow server` makes it with workers that take seconds each."""
    from mlflow.server import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, app
    from werkzeug.serving import make_server

    os.environ[BACKEND_STORE_URI_ENV_VAR] = f"sqlite:///{folder}/mlflow.db"
    os.environ[ARTIFACT_ROOT_ENV_VAR] = f"{folder}/artifacts"
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(64)
    make_server("127.0.0.1", port, app, threaded=True, fd=listening.fileno()).serve_forever()


@pytest.fixture
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own is taken."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.05)

    return wait
