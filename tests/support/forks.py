"""Ray's worker processes, and `finray` commands, forked from one process that has imported what they all import.

That costs each of them some six seconds of a core. Ray starts a worker with a script that sets its environment up.
Under :func:`server` that script is `fork_ray_worker`, which hands arguments, environment and output to the server. The
server forks, and the child runs Ray's own script of a worker. Ray knows a worker by the process id that it registers
with.

Only the Ray that tests share does this and, under :data:`ON_HOSTS`, that of tests/hosts/kills.py. One that finray
starts has workers that start as always: see tests/faults/test_signals.py, tests/integration/test_driver.py and
test_notebook.py. :func:`tests.support.runs.cli` starts a command as always.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO
from unittest import mock

SOCKET = "FINRAY_TESTS_FORK"
# Set where workers belong on hosts of :mod:`tests.support.hosts`.
ON_HOSTS = "FINRAY_TESTS_FORK_ON_HOSTS"
HERE = Path(__file__)
SCRIPT = str(HERE.with_name("fork_ray_worker.py"))
# What a worker of a small run imports, but for Ray: its core reads environment variables when it is imported.
PRELOADED = ["torch", "peft", "transformers.models.llama.modeling_llama", "finray.training.assemble"]
PRELOADED += ["finray.runtime.worker", "finray.runtime.prepare", "finray.tasks.causal_lm"]
PRELOADED += ["colorful", "google.protobuf.json_format", "jsonschema", "msgpack", "pandas", "pyarrow.dataset"]
# And what commands do.
PRELOADED += ["finray.cli.main", "finray.evaluation.generate", "finray.inspection.inspect", "finray.planning.plan"]
PRELOADED += ["finray.models.export", "finray.runtime.driver", "finray.cli.start", "requests"]


@contextmanager
def server(folder: Path) -> Iterator[None]:
    """Within it :func:`finray` works, and a Ray that is started under :func:`forking_ray` forks its workers.

    Args:
        folder: for the socket, and for what the server says.
    """
    os.environ[SOCKET] = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listening, (folder / "log").open("w") as log:
        listening.bind(os.environ[SOCKET])
        listening.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno())],
            # A thread of libgomp's would not be there after a fork. Workers set their number of threads themselves.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=HERE.parents[2],
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.communicate()
        del os.environ[SOCKET]


def forking_ray() -> AbstractContextManager[object]:
    """A Ray that is started within it forks its workers; it is to be stopped before the server is."""
    # A path that is absolute replaces what it is joined to.
    return mock.patch("ray._private.ray_constants.SETUP_WORKER_FILENAME", SCRIPT)


class Command:
    """A `finray ...` in a process of its own, with what tests use of :class:`subprocess.Popen`.

    Args:
        arguments: of the command.
        env: variables that are other ones; one of None is not set.
        cwd: where it is run.

    Attributes:
        pid: of the process.
        returncode: once it is known that it has ended.
        stdout: what it prints.
    """

    def __init__(
        self, *arguments: object, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
    ) -> None:
        changed = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        message = json.dumps([["finray", *map(str, arguments)], changed, str(cwd or Path.cwd())])
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(300)
        self._server.connect(os.environ[SOCKET])
        socket.send_fds(self._server, [b"f"], [out_end, err_end])
        os.close(out_end)
        os.close(err_end)
        self._server.sendall(message.encode())
        self._server.shutdown(socket.SHUT_WR)
        self.stdout = os.fdopen(out, encoding="utf-8")
        # Read beside the other, or a process that says much would wait.
        self._errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self._errors.append(_read(os.fdopen(err))), daemon=True)
        self._reader.start()
        self.returncode: int | None = None
        self.pid = self._told()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = self._told()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """To the process, where it is still there."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it still says on standard output, and all that it said on standard error, when it has ended."""
        out = "" if self.stdout.closed else _read(self.stdout)
        self._reader.join(timeout)
        if self.returncode is None:
            self._server.settimeout(timeout)
            self.returncode = self._told()
            self._server.close()
        return out, "".join(self._errors)

    def _told(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            line += (byte := self._server.recv(1))
            assert byte, "the server has ended"
        return int(line)


def _read(file: TextIO) -> str:
    with file:
        return file.read()


def finray(
    *arguments: object, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run `finray ...` in a process of its own: exit code, standard output, standard error."""
    command = Command(*arguments, env=env, cwd=cwd)
    out, err = command.communicate()
    assert command.returncode is not None
    return command.returncode, out, err


def serve(listening: socket.socket) -> None:
    """Fork a child for each connection until standard input is closed, and tell who asked how it ended."""
    for name in PRELOADED:
        # What is wrong with a module is said where it is used.
        with suppress(Exception):
            importlib.import_module(name)
    assert "ray" not in sys.modules
    # Else a collection in a child would write to, and so copy, the pages of every object.
    gc.freeze()
    asked: dict[int, socket.socket] = {}
    # The end of a child is a byte in this pipe: a handler might run before its number is known.
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while sys.stdin not in (ready := select.select([listening, sys.stdin, ended], [], [])[0]):
        if ended in ready:
            os.read(ended, 4096)
            _tell(asked)
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        kind, received, _, _ = socket.recv_fds(connection, 1, 2 + 5)
        output, spaces = received[:2], received[2:]
        with connection.makefile("rb") as message:
            words, env, folder = json.load(message)
        if (child := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (listening, connection, *asked.values()):
                one.close()
            os.close(ended)
            os.close(wake)
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *output)):
                os.dup2(file, number)
                os.close(file)
            _enter(spaces)
            return (_work if kind == b"r" else _command)(words, env, folder)
        for file in received:
            os.close(file)
        # Ray's script is gone already.
        with suppress(OSError):
            connection.sendall(f"{child}\n".encode())
        asked[child] = connection
    return None


def _tell(asked: dict[int, socket.socket]) -> None:
    """A process that has ended is gone at once, as it is where Ray is its parent; Ray's script does not wait for it."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with asked.pop(found[0]) as connection, suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(found[1])}\n".encode())


def _enter(spaces: list[int]) -> None:
    """Go where a worker is to be, as `nsenter` does: a process id there needs a child, whose end is then this one's."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0):
            os._exit(1)
        os.close(space)
    if spaces and (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def _work(words: list[str], env: dict[str, str], folder: str) -> None:
    """What Ray's `setup_worker.py` and then its `default_worker.py` do."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    parser.add_argument("--language")
    options, words = parser.parse_known_args(words)
    context = options.serialized_runtime_env_context
    assert not context.get("command_prefix"), "only variables are known here"
    # Ray ends the process group of a worker with it.
    os.setpgrp()
    _become(words, env | context.get("env_vars", {}), folder, path=Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def _command(words: list[str], env: dict[str, str], folder: str) -> None:
    from finray.cli.start import main

    _become(words, env, folder, path=Path(folder))
    main()


def _become(words: list[str], env: dict[str, str], folder: str, *, path: Path) -> None:
    read = [{name: value for name, value in one.items() if name.startswith("HF_H")} for one in (os.environ, env)]
    assert read[0] == read[1], "huggingface_hub reads these when it is imported"
    before, after = (one.get("PYTHONPATH", "").split(os.pathsep) for one in (os.environ, env))
    sys.path[:] = [str(path), *filter(None, after), *(one for one in sys.path[1:] if one not in before)]
    sys.argv = words
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
