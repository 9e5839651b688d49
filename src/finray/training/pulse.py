"""The progress of this rank, readable from other threads: its step, and whether it computes or waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

# `computing`: in a step, before its all-reduce; `waiting`: in the all-reduce, or for a device that is in it; `other`:
# between two steps.
Phase = Literal["computing", "waiting", "other"]


class Pulse:
    """Written by the loop, read by another thread.

    Attributes:
        step: the current step.
        phase: phase of the step.
        steps: steps completed since the start.
        work_s: this rank's own time in these steps, before the all-reduces, in seconds.
        longest_s: seconds of the longest step so far.
        part: what an evaluation is doing; empty outside of evaluations.
        share: how much of that is done, from 0 to 1.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = self.steps = 0
        self.phase: Phase = "other"
        self.work_s = self.longest_s = 0.0
        self.part, self.share = "", 0.0
        self._clock = clock
        self._began = 0.0

    def begins(self, step: int) -> None:
        """A step begins."""
        self.step, self._began = step, self._clock()
        self.phase = "computing"

    def waits(self) -> None:
        """This rank has finished its part of the step."""
        self.work_s += self._clock() - self._began
        self.phase = "waiting"

    def ends(self) -> None:
        """The step is done."""
        self.steps += 1
        self.longest_s = max(self.longest_s, self._clock() - self._began)
        self.phase = "other"

    def evaluates(self, part: str, share: float) -> None:
        """An evaluation after the current step has come so far; an empty ``part`` ends it."""
        self.part, self.share = part, share
