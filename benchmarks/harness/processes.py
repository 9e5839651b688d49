"""Each measurement is a process of its own, with the threads and the allocator that it is to have."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.tree import MemoryWatch, Peaks, ProcessTree

TIMEOUT_S = 3600.0
# What would tell one side more than the other; each run is given its own.
_CLEARED = ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAY_ADDRESS", "LD_PRELOAD", "PYTHONPATH")


class BenchmarkError(Exception):
    """A measurement failed."""


def environment(*, threads: int, allocator: str | None = None) -> dict[str, str]:
    """This process's environment with a number of threads, and glibc's allocator set up or left as it is."""
    kept = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    added = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **added, **({} if allocator is None else {"GLIBC_TUNABLES": allocator})}


def run_command(command: Sequence[str], *, env: Mapping[str, str]) -> str:
    """Run a command to its end; returns what it printed.

    Raises:
        BenchmarkError: it failed; the end of its error output is in the message.
    """
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise _failed(command, f"ended with {done.returncode}", done.stderr or done.stdout)
    return done.stdout


def _failed(command: Sequence[str], what: str, output: str) -> BenchmarkError:
    tail = "\n".join(output.strip().splitlines()[-15:])
    return BenchmarkError(f"{' '.join(command)}\n{what}:\n{tail}")


def run_script(python: str, script: Path, options: Sequence[str], *, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a script that prints its result as one line of JSON, the last one."""
    output = run_command([python, str(script), *options], env=env)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def run_group(
    python: str, script: Path, options: Sequence[str], *, env: Mapping[str, str], processes: int
) -> list[dict[str, Any]]:
    """Run a script in processes that find each other through torch's variables; the results, in order of rank.

    Raises:
        BenchmarkError: one failed, or they took too long; the others are ended.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    common |= {"LOCAL_WORLD_SIZE": str(processes)}
    command = [python, str(script), *options]
    deadline = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        started = [
            stack.enter_context(_started(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(processes)
        ]
        while any(process.poll() is None for process, *_ in started):
            for process, _, output, errors in started:
                if process.poll():
                    raise _failed(command, f"ended with {process.returncode}", _text(errors) or _text(output))
            if time.monotonic() > deadline:
                raise _failed(command, f"was not done after {TIMEOUT_S:.0f} s", _text(started[0][3]))
            time.sleep(0.1)
        for process, _, output, errors in started:
            if process.returncode:
                raise _failed(command, f"ended with {process.returncode}", _text(errors) or _text(output))
        return [json.loads(_text(output).strip().splitlines()[-1]) for _, _, output, _ in started]


@dataclass(frozen=True, slots=True)
class Watched:
    """A command that was run, and the memory it took with all that it started."""

    result: dict[str, Any]
    seconds: float
    peaks: Peaks


def run_watched(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Watched:
    """Run a command that prints its result as one line of JSON, the last one, and watch its memory.

    Raises:
        BenchmarkError: it failed, or took too long; the end of its error output is in the message.
    """
    with _started(command, env) as (process, tree, output, errors):
        watch = MemoryWatch(tree)
        began = time.perf_counter()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _failed(command, f"was not done after {timeout_s:.0f} s", _text(errors)) from None
        finally:
            peaks = watch.stop()
        seconds = time.perf_counter() - began
        if process.returncode:
            raise _failed(command, f"ended with {process.returncode}", _text(errors) or _text(output))
        return Watched(json.loads(_text(output).strip().splitlines()[-1]), seconds, peaks)


def run_until(
    command: Sequence[str], happened: Callable[[], bool], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> Watched:
    """Run a command until something has happened, and end it; the result is empty.

    Raises:
        BenchmarkError: it ended before that, or took too long.
    """
    with _started(command, env) as (process, tree, output, errors):
        watch = MemoryWatch(tree)
        began = time.perf_counter()
        try:
            while not happened():
                if process.poll() is not None and not happened():
                    raise _failed(command, f"ended with {process.returncode} too early", _text(errors) or _text(output))
                if time.perf_counter() - began > timeout_s:
                    raise _failed(command, f"was not so far after {timeout_s:.0f} s", _text(errors))
                time.sleep(0.02)
            seconds = time.perf_counter() - began
        finally:
            peaks = watch.stop()
        return Watched({}, seconds, peaks)


Started = tuple["subprocess.Popen[bytes]", ProcessTree, IO[bytes], IO[bytes]]


@contextmanager
def _started(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Started]:
    """A running command; whatever is left of it and of what it started is ended on the way out."""
    # Files and not pipes: nobody reads while the command runs, and a full pipe would stop it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=errors, stdin=subprocess.DEVNULL)
        tree = ProcessTree(process.pid)
        try:
            yield process, tree, output, errors
        finally:
            tree.end(patience_s=10)
            process.wait()


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", errors="replace")
