"""Measurements that all contenders make of themselves. A peer takes its job as JSON and prints one line of JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before any library reads them. `benchmarks/` has the code that the peers share with the runner.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Job:
    """A fine-tuning job for a peer."""

    model: str  # directory
    rows: str  # JSON Lines with "messages", or with "prompt" and "completion"; the last answer is trained on
    steps: list[list[int]]  # the row numbers of every optimizer step, warm-up included
    warmup: int = 2  # first steps, not timed
    mode: str = "best"  # or `defaults`, if the peer has both
    precision: str = "bf16"  # or `fp32`
    learning_rate: float = 1e-4  # decays linearly to zero
    rank: int = 8  # LoRA rank on all linear layers; alpha is twice that; 0 trains all weights
    max_length: int = 1024  # maximum tokens in a row
    seed: int = 17  # for random numbers
    start: str | None = None  # an adapter to start from
    save_start: str | None = None  # where to write the untrained adapter
    done: str | None = None  # file to write at the end of the first step, after which the process exits
    processes: int = 2  # processes that prepare the rows


def job(kind: type[Any]) -> Any:
    """The job of this process, from the command line.

    Raises:
        SystemExit: there is none, or it has unknown fields.
    """
    names = {one.name for one in fields(kind)}
    given = json.loads(sys.argv[1]) if len(sys.argv) == 2 else None
    if given is None or set(given) - names:
        raise SystemExit(f"usage: {sys.argv[0]} '{{\"field\": value, ...}}' with {', '.join(sorted(names))}")
    return kind(**given)


def emit(result: dict[str, Any], *packages: str) -> None:
    """Print a result, with package versions."""
    print(json.dumps({**result, "versions": {name: version(name) for name in packages}}), flush=True)


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        # `ru_maxrss` is never below the value of the process that this one was forked from, even after exec.
        return int(status.read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_process_start() -> float:
    """Wall time since this process was started."""
    started = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


@dataclass
class Clock:
    """Readings at the end of every optimizer step: the time, this process's CPU time, and its peak memory."""

    startup_seconds: float = 0.0
    marks: list[float] = field(default_factory=list)
    cpu_marks: list[float] = field(default_factory=list)
    resident_before: int = 0
    peak_rss_bytes: int = 0

    def begin(self) -> None:
        """The first step begins."""
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        self.resident_before = pages * os.sysconf("SC_PAGE_SIZE")

    def step_done(self) -> None:
        """A step has ended."""
        self.startup_seconds = self.startup_seconds or seconds_since_process_start()
        self.marks.append(time.time())
        self.cpu_marks.append(cpu_seconds())
        self.peak_rss_bytes = peak_rss_bytes()


class Turns:
    """Alternates steps with other processes, so that all run under the same conditions.

    Args:
        fifos: one is read before a step, the other is written after it: the next process waits for that.
        steps: of this process.
    """

    def __init__(self, fifos: list[str], steps: int) -> None:
        self._steps = steps
        # Opened for reading and writing, so that neither opening nor writing waits for the other process.
        self._mine, self._other = (os.open(fifo, os.O_RDWR) for fifo in fifos)
        self.seconds: list[float] = []

    def wait(self) -> None:
        os.read(self._mine, 1)
        self._began = time.perf_counter()

    def pass_on(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        os.write(self._other, b".")
        if len(self.seconds) < self._steps:
            self.wait()


def trained(clock: Clock, settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The result of a training run, with the names shared by all contenders.

    Args:
        clock: the clock that recorded every step.
        settings: the settings of the run, as read back, not as requested.
        fields: for each step `rows` (row numbers), `own_tokens` (the contender's own count, without padding),
            `padded_tokens`, `targets` (tokens with loss), `losses` and `norms` (gradient norms before clipping); and
            `trainable_parameters`.
    """
    names = {"rows", "own_tokens", "padded_tokens", "targets", "losses", "norms", "trainable_parameters"}
    if set(fields) != names:
        raise TypeError(f"a training's result has {names}, not {set(fields)}")
    return {
        **fields,
        "marks": clock.marks,
        "cpu_marks": clock.cpu_marks,
        "peak_rss_bytes": clock.peak_rss_bytes,
        "step_bytes": clock.peak_rss_bytes - clock.resident_before,
        "startup_seconds": clock.startup_seconds,
        "settings": {**settings, "glibc_tunables": os.environ.get("GLIBC_TUNABLES", "")},
    }


def world_size() -> int:
    """The number of processes in this process's group."""
    return int(os.environ.get("WORLD_SIZE", "1"))
