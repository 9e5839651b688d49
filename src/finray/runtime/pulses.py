"""Finds hanging and slow ranks in the driver, from the heartbeats of all ranks.

Every rank sends a :class:`~finray.records.Beat` every few seconds, from a thread: steps cost nothing extra, and the
driver's load does not grow with the steps. A stopped rank, or one whose machine is cut off, sends none; one that hangs
in a step keeps sending the same. A rank whose connection broke reconnects, or counts as silent. Heartbeats begin before
the imports of a worker; one that hangs even earlier is known from Ray's table of actors.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.records import Beat, Note
from finray.runtime.failures import LOADING

# Report a rank whose own part of a step takes this many times as long as the others', after this many steps.
SLOW, SLOW_STEPS = 1.5, 10
# A step may take this many times as long as the longest before it; loading and the first step, which may compile, this
# many times the hang timeout.
_LONGER, _FIRST = 3.0, 6.0
# Starting takes no less where steps are short: the first import of torch from a network file system takes minutes.
START_S = 300.0
# The rank of a worker that has not reported, and that of an asynchronous evaluation.
UNKNOWN, EVALUATOR = -1, -2
_EXAMINE_S = 30.0
_DUMP_S = 10.0
# How long a process may take to write its stack and copy it to its log.
_LOG_S = 5.0
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that the others wait for, and the evidence."""

    ranks: Sequence[Beat]
    why: str


@dataclass(slots=True)
class _Rank:
    beat: Beat
    heard: float
    since: float
    is_lost: bool = False


class Pulses:
    """Heartbeats of the ranks of the current attempt; a rank hangs after ``hang_s`` seconds without one (None:
    never)."""

    def __init__(self, hang_s: float | None) -> None:
        self._hang_s = hang_s
        self._ranks: dict[int, _Rank] = {}
        # Workers by node and process id: those that have reported, and those that have not.
        self._heard: set[tuple[str, int]] = set()
        self._mute: dict[tuple[str, int], _Rank] = {}
        self._evaluation: _Rank | None = None
        self._attempt = ""
        self._ended: set[str] = set()
        self._named_slow: set[tuple[str, int]] = set()
        self._looked: float | None = None

    def hear(self, beat: Beat, now: float) -> None:
        """Add a heartbeat; those of an earlier attempt are ignored."""
        if beat.rank == EVALUATOR:
            self._hear_evaluation(beat, now)
            return
        self._heard.add((beat.node, beat.pid))
        self._mute.pop((beat.node, beat.pid), None)
        if beat.attempt in self._ended:
            return
        if beat.attempt != self._attempt:
            self.forget()
            self._attempt = beat.attempt
        if beat.phase == "gone":
            # If one rank ends, Ray ends all of them.
            self.forget()
            return
        before = self._ranks.get(beat.rank)
        if beat.phase == "lost":
            if before is not None:
                before.is_lost = True
            return
        same = before is not None and (before.beat.step, before.beat.phase) == (beat.step, beat.phase)
        self._ranks[beat.rank] = _Rank(beat, now, before.since if same and before is not None else now)

    def _hear_evaluation(self, beat: Beat, now: float) -> None:
        before = self._evaluation
        if beat.phase in ("gone", "lost"):
            if before is not None and before.beat.pid == beat.pid:
                self._evaluation = None
            return
        same = before is not None and before.beat == beat
        self._evaluation = _Rank(beat, now, before.since if same and before is not None else now)

    def forget(self) -> None:
        """The attempt is over."""
        self._ended.add(self._attempt)
        self._ranks.clear()

    def expect(self, workers: Sequence[Beat], now: float) -> None:
        """Wait for reports of these workers, which Ray has started, and of no others."""
        expected = {(beat.node, beat.pid): beat for beat in workers}
        self._heard &= expected.keys()
        mute = {key: beat for key, beat in expected.items() if key not in self._heard}
        self._mute = {key: self._mute.get(key) or _Rank(beat, now, now) for key, beat in mute.items()}

    def ended(self, hang: Hang, now: float) -> None:
        """Hanging ranks were ended. If that failed, they are noticed again."""
        for beat in hang.ranks:
            self._mute.pop((beat.node, beat.pid), None)
            if beat.rank == EVALUATOR:
                self._evaluation = None
            if beat.rank in self._ranks and self._ranks[beat.rank].beat.pid == beat.pid:
                del self._ranks[beat.rank]
        self._restart_clocks(now)

    def _restart_clocks(self, now: float) -> None:
        for rank in (*self._ranks.values(), *self._mute.values(), *filter(None, [self._evaluation])):
            rank.heard = rank.since = now

    @property
    def is_training(self) -> bool:
        """Whether a rank has loaded: then all have reported."""
        return any(rank.beat.step != LOADING and not rank.is_lost for rank in self._ranks.values())

    @property
    def is_evaluating(self) -> bool:
        """Whether an asynchronous evaluation is running."""
        return self._evaluation is not None

    def hosts(self) -> dict[str, str]:
        """Machines with workers: Ray's node id and the host name."""
        return {rank.beat.node: rank.beat.host for rank in self._ranks.values()}

    def hung(self, now: float) -> Hang | None:
        """The ranks that hang."""
        if self._hang_s is None:
            return None
        ranks = list(self._ranks.values())
        looked, self._looked = self._looked, now
        if looked is None or now - looked > self._hang_s / 5:
            # This process itself was stopped, or had no time to listen.
            self._restart_clocks(now)
        first_s = _FIRST * self._hang_s
        start_s = max(first_s, START_S)
        if mute := [rank.beat for rank in self._mute.values() if now - rank.since > start_s]:
            return Hang(mute, f"has not reported since it started {start_s:g} s ago")
        if (evaluation := self._evaluation) is not None:
            # Loading and, after the last answer, scores have as much time as they need.
            is_counted = evaluation.beat.part and evaluation.beat.share < 1
            if now - (evaluation.since if is_counted else evaluation.heard) > start_s:
                return Hang([evaluation.beat], f"has made no progress for {start_s:g} s")
        if all(rank.is_lost for rank in ranks):
            # All processes or the network are gone: as far as we know, no rank is waiting.
            return None
        silent = [
            rank.beat for rank in ranks if now - rank.heard > (start_s if rank.beat.step == LOADING else self._hang_s)
        ]
        if silent:
            return Hang(silent, f"has not reported for {start_s if silent[0].step == LOADING else self._hang_s:g} s")
        # Loading itself may wait for a download, or for the data: there only silence is a hang.
        starting = [rank for rank in ranks if rank.beat.step == LOADING and rank.beat.phase != "other"]
        # Those that have not reported are known a little later, and the others may wait for them.
        if not self._mute and (late := [rank.beat for rank in starting if now - rank.since > start_s]):
            behind = [beat for beat in late if beat.phase == "computing"] or late
            return Hang(behind, f"has not joined the other workers {start_s:g} s after its start")
        is_first = not all(rank.beat.steps for rank in ranks)
        least_s = first_s if is_first else self._hang_s
        limit = max([least_s, *(_LONGER * rank.beat.longest_s for rank in ranks)])
        stuck = [
            rank
            for rank in ranks
            if now - rank.since > limit and rank.beat.phase != "other" and rank.beat.step != LOADING
        ]
        waiting = [rank for rank in stuck if rank.beat.phase == "waiting"]
        if waiting and (behind := [rank.beat for rank in ranks if rank.beat.phase != "waiting"]):
            # A rank with a GPU may wait rank step later, for a number of this rank.
            step = min(beat.step for beat in behind)
            return Hang(behind, f"has not reached the all-reduce of step {step} for {limit:g} s, where the others wait")
        if stuck and all(now - rank.since > limit and rank.beat.phase != "other" for rank in ranks):
            where = "wait for each other in its all-reduce" if waiting else "compute"
            return Hang(
                [rank.beat for rank in stuck], f"has been in step {stuck[0].beat.step} for {limit:g} s; all {where}"
            )
        return None

    def slow(self) -> Note | None:
        """A note about a rank whose own part of a step takes much longer than the others', once."""
        beats = [rank.beat for rank in self._ranks.values()]
        if len(beats) < 2 or any(beat.steps < SLOW_STEPS for beat in beats):
            return None
        step_s = {beat: beat.work_s / beat.steps for beat in beats}
        slowest = max(step_s, key=lambda beat: step_s[beat])
        others = statistics.median(seconds for beat, seconds in step_s.items() if beat is not slowest)
        key = (self._attempt, slowest.rank)
        if step_s[slowest] < SLOW * others or key in self._named_slow:
            return None
        self._named_slow.add(key)
        times = f"its part of a step takes {step_s[slowest]:.3g} s, the others take {others:.3g} s and wait for it"
        text = f"{named(slowest)} is slow: {times}"
        return Note(text, slowest.step, "warning")


def named(beat: Beat) -> str:
    """A description of a rank."""
    who = {UNKNOWN: "a worker", EVALUATOR: f"the evaluation of step {beat.step}"}.get(beat.rank, f"rank {beat.rank}")
    return f"{who} (pid {beat.pid} on {beat.host})"


def end_hanging(ray: Any, hang: Hang) -> list[str]:
    """Examine hanging ranks and end their processes, so that Ray restarts the workers; returns what was found."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    descriptions = []
    for beat in hang.ranks[:_SHOWN]:
        description = ""
        with suppress(Exception):
            if beat.node == ray.get_runtime_context().get_node_id():
                description = examine(beat.pid, has_log=beat.rank != UNKNOWN)
            else:
                # A node that is cut off does not answer, and Ray notices the loss of its workers itself.
                where = NodeAffinitySchedulingStrategy(beat.node, soft=False)
                task = ray.remote(num_cpus=0, max_retries=0)(examine).options(scheduling_strategy=where)
                description = ray.get(task.remote(beat.pid, has_log=beat.rank != UNKNOWN), timeout=_EXAMINE_S)
        descriptions.append(f"{named(beat)}: {description or 'its machine does not answer'}")
    return descriptions


def examine(pid: int, *, has_log: bool = True) -> str:
    """Describe what a worker's process on this machine is doing, with its stack if it has set a signal handler that
    writes it to its log (``has_log``); then end it."""
    import psutil

    try:
        process = psutil.Process(pid)
        if not " ".join(process.cmdline()).startswith("ray::"):
            return "the process is gone"
        state = str(process.status())
    except psutil.Error:
        return "the process is gone"
    words = {
        "stopped": "it is stopped (SIGSTOP)",
        "disk-sleep": "it waits in the kernel for a disk or a network file system",
    }
    lines = [words.get(state, f"it is {state}")]
    # Ray installs py-spy, but not necessarily on the PATH.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (spy := shutil.which("py-spy", path=places)) is not None:
        with suppress(OSError, subprocess.SubprocessError):
            command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S, check=False)
            lines += [done.stdout.strip()] if done.returncode == 0 else []
    if has_log and len(lines) == 1 and state != "stopped":
        # Its signal handler writes the stacks to standard error, which goes to its log.
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(_LOG_S)
        lines.append("its stack is in its log (py-spy, if installed and permitted, prints it here)")
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    return "\n".join(lines)
