"""Profiles steps: a trace by torch.profiler, and a table of the parts of a step.

On a GPU the parts are timed by CUDA events, so that measuring does not make a step wait. torch.profiler's sums for a
``record_function`` would miss the backward pass, whose kernels another thread launches. Its ``schedule`` does not fit
either: it counts the steps of a process, and a resumed run may start among the steps to profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import ProfileConfig
from finray.files import replace_text
from finray.parallel.base import Strategy

PARTS = ("data wait", "forward", "backward", "all_reduce", "clip", "optimizer")
_ROWS = 15

# Context manager that times a part of a step, by name.
Parts = Callable[[str], AbstractContextManager[None]]


def no_parts(name: str) -> AbstractContextManager[None]:  # noqa: ARG001
    """Measures nothing."""
    return nullcontext()


class Profiler:
    """Profiles some steps on one rank.

    Args:
        config: the steps to profile; None profiles none.
        run_dir: parent of the folder with trace and summary, which rank 0 writes.
        strategy: of the group.
        notify: called with the summary.

    Attributes:
        parts: times the parts of the current step.
    """

    def __init__(
        self, config: ProfileConfig | None, run_dir: Path, strategy: Strategy, *, notify: Callable[[str], None]
    ) -> None:
        self.parts: Parts = no_parts
        self._steps = None if config is None else config.steps
        self._folder = run_dir / "profile"
        self._rank = strategy.rank
        self._on_gpu = strategy.device.type == "cuda"
        self._notify = notify
        self._profile: Any = None
        self._begun = 0.0
        self._done = 0
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def before(self, step: int) -> None:
        """Call before a step."""
        if self._steps is None or self._profile is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self._on_gpu else [kinds.CPU]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()
        self._synchronize()
        self._begun, self.parts = time.perf_counter(), self._part

    def after(self, step: int) -> None:
        """Call after a step."""
        if self._profile is not None and self._steps is not None:
            self._done += 1
            if step >= self._steps[1]:
                self.close()

    def close(self) -> None:
        """Write the results; also if the run ends before the last of the steps."""
        if self._profile is None:
            return
        self._synchronize()
        seconds = time.perf_counter() - self._begun
        profile, self._profile, self.parts, self._steps = self._profile, None, no_parts, None
        profile.stop()
        done = self._done
        if not done:
            return
        parts = self._seconds
        for name, start, end in self._events:
            parts[name] = parts.get(name, 0.0) + start.elapsed_time(end) / 1000
        self._folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(self._folder / f"trace-rank{self._rank}.json.gz"))
        if self._rank == 0:
            shown = [(name, parts.get(name, 0.0)) for name in PARTS] + [("rest", seconds - sum(parts.values()))]
            lines = [f"profile of {done} steps: {seconds / done * 1000:.1f} ms a step (with the profiler on)", ""]
            lines += [f"  {name:16}{value / done * 1000:12.2f} ms {value / seconds:7.1%}" for name, value in shown]
            order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
            operations = profile.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=60)
            text = "\n".join([*lines, "", operations, ""])
            replace_text(self._folder / "summary.txt", text)
            self._notify(text)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

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
