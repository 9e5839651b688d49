"""Where the time of a step goes: a trace by torch's profiler, and a table of the parts of a step.

On a GPU the parts are timed by events in its stream, so that looking does not make the step wait. The time between two
events is that of the work between them, and of the waiting for the CPU to hand that work out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

FOLDER = "profile"
SUMMARY = "summary.txt"
PARTS = ("data wait", "forward", "backward", "sum over ranks", "clip", "optimizer")
_TOP = 15

# Names a part of a step while it lasts.
Parts = Callable[[str], AbstractContextManager[None]]


def no_parts(name: str) -> AbstractContextManager[None]:  # noqa: ARG001
    """Nobody looks."""
    return nullcontext()


class Profiler:
    """Looks at some steps of one rank; at none when it is made without arguments.

    Args:
        steps: the first and the last step, counted from one.
        folder: where trace and summary go; the run directory.
        rank: of this process; rank 0 writes the summary.
        device: of this rank.
        tell: shown the summary.

    Attributes:
        parts: for the parts of the step that runs.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None = None,
        *,
        folder: Path = Path(),
        rank: int = 0,
        device: torch.device | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.parts: Parts = no_parts
        self._steps = steps
        self._folder = folder / FOLDER
        self._rank = rank
        self._device = device or torch.device("cpu")
        self._tell = tell
        self._trace: Any = None
        self._watch = _Stopwatch(self._device)
        self._begun = 0.0
        self._done = 0

    def before(self, step: int) -> None:
        """A step begins."""
        if self._steps is None or self._trace is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities, acc_events=True)
        self._trace.__enter__()
        self._synchronise()
        self._begun, self._done = time.perf_counter(), 0
        self.parts = self._watch

    def after(self, step: int) -> None:
        """A step has ended."""
        if self._trace is None:
            return
        self._done += 1
        assert self._steps is not None
        if step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was seen; also where the run ends before the last of the steps."""
        if self._trace is None:
            return
        self._synchronise()
        seconds = time.perf_counter() - self._begun
        trace, self._trace = self._trace, None
        self.parts, self._steps = no_parts, None
        trace.__exit__(None, None, None)
        if not self._done:
            return
        self._folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(self._folder / f"trace-rank{self._rank}.json.gz"))
        if self._rank == 0:
            text = summary(self._watch.seconds(), seconds, self._done, trace.key_averages(), self._device.type)
            (self._folder / SUMMARY).write_text(text, encoding="utf-8")
            self._tell(text)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Stopwatch:
    """Adds up the seconds of each part."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._part(name)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"finray: {name}"):
            if self._on_gpu:
                make: Any = torch.cuda.Event
                start, end = make(enable_timing=True), make(enable_timing=True)
                start.record()
                yield
                end.record()
                self._events.append((name, start, end))
            else:
                begun = time.perf_counter()
                yield
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """By part; to be read when the device is idle."""
        for name, start, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds


def summary(parts: dict[str, float], seconds: float, steps: int, operations: Any, device: str) -> str:
    """The table of a step's parts, and the operations that took longest.

    Args:
        parts: seconds by part, of all steps.
        seconds: of all steps.
        steps: how many there were.
        operations: torch's averages by operation.
        device: ``cpu`` or ``cuda``: whose time of the operations is shown.
    """
    shown = [(name, parts.get(name, 0.0)) for name in PARTS]
    shown.append(("rest", seconds - sum(parts.values())))
    lines = [f"profile of {steps} steps: {seconds / steps * 1000:.1f} ms a step (with the profiler on)", ""]
    lines += [f"  {name:16}{value / steps * 1000:12.2f} ms {value / seconds:7.1%}" for name, value in shown]
    attribute = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = [one for one in operations if not one.key.startswith(("finray: ", "ProfilerStep"))]
    longest = sorted(found, key=lambda one: getattr(one, attribute), reverse=True)[:_TOP]
    lines += ["", f"operations by their own time on the {'GPU' if device == 'cuda' else 'CPU'}:", ""]
    for one in longest:
        value = getattr(one, attribute) / 1e6
        lines.append(f"  {one.key[:60]:60}{value / steps * 1000:10.2f} ms {one.count / steps:8.1f} calls a step")
    return "\n".join(lines) + "\n"
