"""Measure the recovery after a worker is killed, by phase, on this machine.

    python -m tools.recovery --kills 3

trains an adapter for a small model with two workers on its own Ray, kills one of them with SIGKILL at a random step,
and measures the phases up to the first step after the restart:

- detect: until Ray Train's controller has noticed and decides what to do;
- teardown: until the processes of all workers have exited;
- Ray: until the new workers have started their function;
- workers: until they have formed their process group;
- load: until the model and the checkpoint are loaded;
- first step: until the first step after that is done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

PHASES = ("detect", "teardown", "Ray", "workers", "load", "first step")
PATIENCE_S = 300.0


@dataclass
class Marks:
    """Times of events since a kill, from ``time.monotonic()``."""

    killed: float
    found: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Record the time of an event, the first time that it happens."""
        self.found.setdefault(name, time.monotonic())

    def phases(self) -> dict[str, float]:
        """Seconds of each phase. One that ended before the previous one, or whose end was not seen, counts as 0."""
        seconds, last = {}, self.killed
        for name in PHASES:
            now = max(last, self.found.get(name, last))
            seconds[name], last = now - last, now
        return seconds


class Recovery:
    """Watches a run through the messages to its driver."""

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self.step = 0
        self.attempt = ""
        self.changed = threading.Event()

    def heard(self, record: Any) -> None:
        """Handle a message of a worker."""
        from finray.records import Beat, RunHeader, TrainRecord

        if isinstance(record, Beat) and record.phase not in ("lost", "gone"):
            if self.marks is not None and self.attempt and record.attempt != self.attempt:
                # It joins the group before it reports this.
                self.marks.mark("workers")
            self.attempt = record.attempt
        if isinstance(record, RunHeader) and self.marks is not None:
            self.marks.mark("load")
        if isinstance(record, TrainRecord):
            self.step = record.step
            if self.marks is not None and "load" in self.marks.found:
                self.marks.mark("first step")
            self.changed.set()


def workers() -> set[int]:
    """Worker processes of this process's Ray."""
    found = set()
    for one in psutil.Process().children(recursive=True):
        try:
            if one.status() != psutil.STATUS_ZOMBIE and "RayTrainWorker" in " ".join(one.cmdline()):
                found.add(one.pid)
        except psutil.Error:
            continue
    return found


def config_of(model: Path, folder: Path, *, every: int) -> Any:
    """The config of a run that does not end by itself."""
    from finray.config.load import build_config

    rows = folder / "rows.jsonl"
    lines = [{"prompt": f"{number} and", "completion": f" {number + 1}"} for number in range(256)]
    rows.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    plain = {
        "run": {"output_dir": str(folder / "runs"), "name": "recovery"},
        "model": {"name": str(model)},
        "adapter": {"rank": 4},
        "data": {"source": str(rows), "max_length": 64},
        "train": {"max_steps": 100_000, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32"},
        "checkpoint": {"every_steps": every, "keep_last": 2},
        "evaluation": {"on_start": False},
        "tracking": {"tensorboard": False, "log_every": 1},
        "cluster": {"num_workers": 2, "cpus_per_worker": 1, "max_failures": 1000},
    }
    return build_config(plain, source="recovery")


def measure(model: Path, kills: int, *, seed: int, every: int) -> list[dict[str, float]]:
    """Seconds of each phase, for each kill."""
    from finray.runtime import driver, progress

    recovery, draw = Recovery(), random.Random(seed)

    class Listening(progress.Listener):
        def __init__(self, host: str, handle: Any, resize: Any, asked: Any) -> None:
            def both(record: Any) -> None:
                recovery.heard(record)
                handle(record)

            def decide() -> int:
                # The controller calls this when it decides.
                if recovery.marks is not None:
                    recovery.marks.mark("detect")
                return int(asked())

            super().__init__(host, both, resize, decide)

    driver.Listener = Listening  # type: ignore[misc]
    found: list[dict[str, float]] = []
    problems: list[str] = []

    def wait_for(what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
            # Not more often: to look at all processes costs CPU that the workers need.
            time.sleep(0.2)

    def kill() -> None:
        for _ in range(kills):
            goal = recovery.step + draw.randrange(every, 3 * every)
            wait_for(f"step {goal}", lambda goal=goal: recovery.step >= goal)  # type: ignore[misc]
            old = workers()
            victim = draw.choice(sorted(old))
            recovery.marks = marks = Marks(time.monotonic())
            os.kill(victim, signal.SIGKILL)

            def is_again(old: set[int] = old, marks: Marks = marks) -> bool:
                now = workers()
                if not now & old:
                    marks.mark("teardown")
                    if len(now) > 1:
                        marks.mark("Ray")
                return "first step" in marks.found

            wait_for("a step after the kill", is_again)
            recovery.marks = None
            found.append(marks.phases())
            print(json.dumps({name: round(value, 2) for name, value in found[-1].items()}), file=sys.stderr, flush=True)

    def kill_and_end() -> None:
        try:
            kill()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        finally:
            # Whatever happened here, the training must not go on without anybody looking.
            os.kill(os.getpid(), signal.SIGINT)

    with tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=kill_and_end, daemon=True).start()
        with suppress(KeyboardInterrupt):
            driver.train(config_of(model, Path(folder), every=every))
    if problems or len(found) < kills:
        raise SystemExit(f"{len(found)} of {kills} kills were measured: {'; '.join(problems) or 'the training ended'}")
    return found


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = measure(options.model.absolute(), options.kills, seed=options.seed, every=options.every)
    print("| phase | seconds: median (smallest to largest) |\n| --- | ---: |")
    for name in (*PHASES, "together"):
        values = [sum(one.values()) if name == "together" else one[name] for one in found]
        print(f"| {name} | {median(values):.1f} ({min(values):.1f} to {max(values):.1f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
