"""Ray's worker processes, and `finray` commands, forked from one process that has imported what they all import.

That costs each of them some six seconds of a core. Ray starts a worker with a script that sets its environment up.
Under :func:`server` that script is `fork_ray_worker`, which hands arguments, environment and output to the server. The
server forks, and the child runs Ray's own script of a worker. Ray knows a worker by the process id that it registers
with.

Only the Ray that tests share does this. One that finray starts has workers that start as always: see
tests/faults/test_signals.py, tests/integration/test_driver.py and test_notebook.py. :func:`tests.support.runs.cli`
starts a command as always.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from unittest import mock

SOCKET = "FINRAY_TESTS_FORK"
HERE = Path(__file__)
# What a worker of a small run imports, but for Ray: its core reads environment variables when it is imported.
PRELOADED = ["torch", "peft", "transformers.models.llama.modeling_llama", "finray.training.assemble"]
PRELOADED += ["finray.runtime.worker", "finray.runtime.prepare", "finray.tasks.causal_lm"]
PRELOADED += ["colorful", "google.protobuf.json_format", "jsonschema", "msgpack", "pandas", "pyarrow.dataset"]
# And what commands do.
PRELOADED += ["finray.cli.main", "finray.evaluation.generate", "finray.inspection.inspect", "finray.planning.plan"]
PRELOADED += ["finray.models.export", "finray.runtime.driver", "requests"]


@contextmanager
def server(folder: Path) -> Iterator[None]:
    """Within it, a Ray that is started forks its workers, and :func:`finray` works. Ray is to be stopped within it.

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
    script = str(HERE.with_name("fork_ray_worker.py"))
    try:
        # A path that is absolute replaces what it is joined to.
        with mock.patch("ray._private.ray_constants.SETUP_WORKER_FILENAME", script):
            yield
    finally:
        process.communicate()
        del os.environ[SOCKET]


def finray(
    *arguments: object, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run `finray ...` in a process of its own: exit code, standard output, standard error.

    Args:
        arguments: of the command.
        env: variables that are other ones; one of None is not set.
        cwd: where it is run.
    """
    changed = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    message = json.dumps([["finray", *map(str, arguments)], changed, str(cwd or Path.cwd())])
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(300)
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [b"f"], [out.fileno(), err.fileno()])
        connection.sendall(message.encode())
        connection.shutdown(socket.SHUT_WR)
        code = connection.recv(16)
        out.seek(0)
        err.seek(0)
        return int(code), out.read(), err.read()


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
        kind, output, _, _ = socket.recv_fds(connection, 1, 2)
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
            return (_work if kind == b"r" else _command)(words, env, folder)
        for file in output:
            os.close(file)
        asked[child] = connection
    return None


def _tell(asked: dict[int, socket.socket]) -> None:
    """A process that has ended is gone at once, as it is where Ray is its parent; Ray's script does not wait for it."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with asked.pop(found[0]) as connection, suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(found[1])).encode())


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
    from finray.cli.main import main

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
