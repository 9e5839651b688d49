"""Run each contender in its own process, with given threads and allocator settings; its memory can be monitored."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from case import BenchmarkError, Result
from finray.planning.placement import KERNEL_CACHE

TIMEOUT_S = 3600.0
PEERS = Path(__file__).resolve().parent / "peers"
SOURCE = Path(__file__).resolve().parents[1] / "src"
# Each run gets its own value; one inherited from the caller would favour one side.
_OF_LIBRARIES = ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "LD_PRELOAD", "PYTHONPATH")
_CLEARED = (*_OF_LIBRARIES, "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "RAY_ADDRESS")


def environment(*, threads: int, allocator: str | None = None, source: Path = SOURCE) -> dict[str, str]:
    """This process's environment variables, with a number of threads, settings of glibc's allocator, and a checkout.

    Args:
        threads: for OpenMP and for the tokenizers library.
        allocator: value of GLIBC_TUNABLES; with it comes finray's limit for oneDNN's cache.
        source: the `src` of the checkout to import `finray` from.
    """
    env = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    env |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if allocator is not None:
        env |= {"GLIBC_TUNABLES": allocator, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNEL_CACHE)}
    return env | {"PYTHONPATH": str(source)}


@dataclass(frozen=True, slots=True)
class Ran:
    """The output of a command, its duration, and the peak memory of its process tree, if monitored."""

    output: str
    seconds: float
    resident: int = 0  # bytes; a page that several processes map counts once for each of them
    proportional: int = 0  # bytes; a page that n processes map counts 1/n for each (PSS), so once in all

    @property
    def result(self) -> Result:
        """The last line of the output, which is JSON."""
        return dict(json.loads(self.output.strip().splitlines()[-1]))


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    until: Callable[[], bool] | None = None,
    watch: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Ran:
    """Run a command to its end, or until a condition holds, and end the rest of its process tree.

    Raises:
        BenchmarkError: it failed, took too long, or ended before `until` was true; the message includes the end of
            stderr.
    """
    with _started(command, env) as running:
        watched = _MemoryWatch(running) if watch else None
        began = time.perf_counter()
        while running.process.poll() is None and not (until is not None and until()):
            if time.perf_counter() - began > timeout_s:
                raise running.failure(f"was not done after {timeout_s:.0f} s")
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        peaks = (0, 0) if watched is None else watched.stop()
        if running.process.returncode or (until is not None and not until()):
            raise running.failure(f"ended with {running.process.returncode}")
        return Ran(running.text(running.output), seconds, *peaks)


def run_group(
    script: str, job: Mapping[str, Any], *, env: Mapping[str, str], processes: int = 1, python: str = sys.executable
) -> list[Result]:
    """Run a script of `peers/` in processes that connect by torch's environment variables; return the results by rank.

    Raises:
        BenchmarkError: one failed, or they took too long; the others are stopped.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [python, PEERS / script, json.dumps(job)]
    deadline = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        group = []
        for rank in range(processes):
            # With a local rank, Accelerate would create a group and wrap the model even for one process.
            place = {"RANK": str(rank), **({"LOCAL_RANK": str(rank)} if processes > 1 else {})}
            group.append(stack.enter_context(_started(command, {**common, **place})))
        while any(one.process.poll() is None for one in group) and time.monotonic() < deadline:
            if any(one.process.poll() for one in group):
                break
            time.sleep(0.1)
        codes = [one.process.poll() for one in group]
        if any(codes) or None in codes:
            at = next((at for at, code in enumerate(codes) if code), codes.index(None) if None in codes else 0)
            raise group[at].failure(f"ended with {codes[at]}")
        return [Ran(one.text(one.output), 0.0).result for one in group]


def in_turn(folder: Path, contenders: Mapping[str, Callable[[list[str]], Result]]) -> dict[str, Result]:
    """Run contenders at the same time, step by step in turn: less noise than one after the other.

    Args:
        folder: for the FIFOs.
        contenders: each is given the two of `measuring.Turns`.
    """
    fifos = [str(folder / f"fifo{number}") for number in range(len(contenders))]
    for fifo in fifos:
        os.mkfifo(fifo)
    ends = [os.open(fifo, os.O_RDWR) for fifo in fifos]

    def one(run: Callable[[list[str]], Result], turns: list[str]) -> Result:
        try:
            return run(turns)
        except BaseException:
            # The others need not wait for it any more.
            for end in ends:
                os.write(end, b"." * 4096)
            raise

    os.write(ends[0], b".")
    try:
        with ThreadPoolExecutor() as threads:
            pairs = zip(contenders.items(), fifos, fifos[1:] + fifos[:1], strict=True)
            futures = {name: threads.submit(one, run, [own, following]) for (name, run), own, following in pairs}
            return {name: future.result() for name, future in futures.items()}
    finally:
        for end in ends:
            os.close(end)


@dataclass(frozen=True)
class _Running:
    process: psutil.Popen
    output: IO[bytes]
    errors: IO[bytes]
    # The process and all that it started. A member remains one if its parent ends first.
    members: set[psutil.Process]

    @staticmethod
    def text(stream: IO[bytes]) -> str:
        stream.seek(0)
        return stream.read().decode("utf-8", errors="replace")

    def failure(self, what: str) -> BenchmarkError:
        said = self.text(self.errors).strip() or self.text(self.output).strip()
        return BenchmarkError(
            "\n".join([f"{' '.join(map(str, self.process.args))}\n{what}:", *said.splitlines()[-15:]])
        )

    def refresh(self) -> list[psutil.Process]:
        """Update the members that are alive."""
        alive = {member.pid: member for member in self.members if member.is_running()}
        for member in list(alive.values()):
            with suppress(psutil.Error):
                # Scan all processes once for each member whose parent is not a member: usually only the root.
                if member.ppid() not in alive:
                    self.members.update(member.children(recursive=True))
        return [member for member in self.members if member.is_running()]


@contextmanager
def _started(command: Sequence[str | Path], env: Mapping[str, str]) -> Iterator[_Running]:
    """A running command. On exit it is terminated; processes of its tree that remain after a while are killed."""
    # Files instead of pipes: nobody reads while the command runs, and a full pipe would block it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        words = [str(word) for word in command]
        process = psutil.Popen(words, env=dict(env), stdout=output, stderr=errors, stdin=subprocess.DEVNULL)
        running = _Running(process, output, errors, {process})
        try:
            yield running
        finally:
            members = running.refresh()
            if process.poll() is None:
                process.terminate()
            _, left = psutil.wait_procs(members, timeout=10)
            for member in left:
                with suppress(psutil.Error):
                    member.kill()
            process.wait()


class _MemoryWatch:
    """Reads a process tree's memory every 0.2 s (the costlier PSS every fifth time); shorter peaks are missed."""

    def __init__(self, running: _Running) -> None:
        self._running = running
        self._stopped = threading.Event()
        self._peaks = (0, 0)
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        self._stopped.set()
        self._thread.join()
        return self._peaks

    def _watch(self) -> None:
        reading = 0
        while not self._stopped.wait(0.2):
            resident = proportional = 0
            for member in self._running.refresh():
                with suppress(psutil.Error):
                    resident += member.memory_info().rss
                    proportional += member.memory_full_info().pss if reading % 5 == 0 else 0
            self._peaks = (max(self._peaks[0], resident), max(self._peaks[1], proportional))
            reading += 1
