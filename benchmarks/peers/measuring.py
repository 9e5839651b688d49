"""What every contender of the CPU training benchmark measures of itself, in the same way."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Batch = dict[str, Any]
Row = dict[str, Any]


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_process_start() -> float:
    """Wall time since this process was started."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class BatchSize:
    """What one batch holds: its real tokens, its area with padding, and the tokens that bear loss."""

    tokens: int
    area: int
    supervised: int

    @classmethod
    def of(cls, batch: Batch) -> BatchSize:
        """Of a batch with `input_ids`, `labels` and perhaps `attention_mask`."""
        area = int(batch["input_ids"].numel())
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else area
        supervised = int((batch["labels"][:, 1:] != -100).sum())  # labels are shifted by one: the first never counts
        return cls(tokens, area, supervised)


@dataclass
class CountingCollator:
    """A trainer's collator, with a record of what it made: one entry a batch, in the order they are trained on.

    The data loader fetches one batch ahead of the step, so only the order tells which step a batch belongs to.
    """

    inner: Callable[[list[Row]], Batch]
    sizes: list[BatchSize] = field(default_factory=list)

    def __call__(self, examples: list[Row]) -> Batch:
        batch = self.inner(examples)
        self.sizes.append(BatchSize.of(batch))
        return batch


@dataclass
class Clock:
    """Wall and CPU seconds of the steps after the first `warmup_steps`, and the loss of every step."""

    warmup_steps: int
    startup_seconds: float = 0.0
    started: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """The first step begins."""
        self.started = (time.perf_counter(), cpu_seconds())

    def step_done(self, number: int) -> None:
        """A step is done; the first is number 1."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        if number == 1:
            self.startup_seconds = seconds_since_process_start()
        if number <= self.warmup_steps:
            self.started = (wall, cpu)
        self.seconds, self.cpu_seconds = wall - self.started[0], cpu - self.started[1]


def figures(clock: Clock, timed: list[BatchSize]) -> dict[str, Any]:
    """The numbers that all contenders give, by the names they share."""
    tokens = sum(size.tokens for size in timed)
    return {
        "tokens": tokens,
        "seconds": clock.seconds,
        "tokens_per_s": tokens / clock.seconds,
        "cpu_seconds": clock.cpu_seconds,
        "cpu_seconds_per_token": clock.cpu_seconds / tokens,
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": clock.losses,
        "supervised_tokens": sum(size.supervised for size in timed),
        "startup_seconds": clock.startup_seconds,
        "padded_tokens": sum(size.area for size in timed),
    }
