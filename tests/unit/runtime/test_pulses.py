"""Who hangs and who is slow, told from what ranks say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from finray.records import Beat
from finray.runtime.pulses import EVALUATOR, UNKNOWN, Hang, Pulses, examine, named
from finray.training.pulse import Pulse

HANG_S = 100.0


def beat(rank: int, step: int, phase: str, *, attempt: str = "a", steps: int = 5, **fields: float) -> Beat:
    return Beat(attempt, rank, f"h{rank}", 100 + rank, f"n{rank}", step, phase, steps, **fields)  # type: ignore[arg-type]


class Ranks:
    """Ranks that say the same again and again, until they are told to say something else."""

    def __init__(self, *beats: Beat) -> None:
        self.pulses, self.now = Pulses(HANG_S), 0.0
        self.workers: list[Beat] | None = None
        self.say(*beats)

    def say(self, *beats: Beat) -> None:
        self.beats = list(beats)

    def after(self, seconds: float) -> Hang | None:
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            for one in self.beats:
                self.pulses.hear(one, self.now)
            if self.workers is not None:
                self.pulses.expect(self.workers, self.now)
            if (hang := self.pulses.hung(self.now)) is not None:
                return hang
        return None


@pytest.mark.parametrize(
    ("beats", "seconds", "ranks", "why"),
    [
        (
            (beat(0, 7, "waiting"), beat(1, 7, "computing"), beat(2, 7, "waiting")),
            HANG_S,
            [1],
            "has not reached the all-reduce of step 7 for 100 s",
        ),
        # The collectives of a GPU return at once, and its numbers are read a step later.
        (
            (beat(0, 8, "waiting"), beat(1, 7, "computing"), beat(2, 8, "waiting")),
            HANG_S,
            [1],
            "has not reached the all-reduce of step 7",
        ),
        ((beat(0, 7, "waiting"), beat(1, 7, "waiting")), HANG_S, [0, 1], "wait for each other"),
        # A first step compiles, and a start imports: both have six times as long.
        (
            (beat(0, 1, "waiting", steps=0), beat(1, 1, "waiting", steps=0)),
            6 * HANG_S,
            [0, 1],
            "has been in step 1 for 600 s; all wait for each other in its all-reduce",
        ),
        (
            (beat(0, -1, "waiting", steps=0), beat(1, -1, "computing", steps=0)),
            6 * HANG_S,
            [1],
            "has not joined the other workers 600 s after its start",
        ),
        # All have imported, and none joins.
        ((beat(0, -1, "waiting", steps=0), beat(1, -1, "waiting", steps=0)), 6 * HANG_S, [0, 1], ""),
    ],
)
def test_the_ranks_that_others_wait_for_are_named(
    beats: tuple[Beat, ...], seconds: float, ranks: list[int], why: str
) -> None:
    watched = Ranks(*beats)
    assert watched.after(seconds - 10) is None
    hang = watched.after(20)
    assert hang is not None
    assert [named.rank for named in hang.ranks] == ranks
    assert why in hang.why


@pytest.mark.parametrize(("step", "seconds"), [(7, HANG_S), (-1, 6 * HANG_S)])
def test_a_rank_that_says_nothing_is_named(step: int, seconds: float) -> None:
    ranks = Ranks(beat(0, step, "other", steps=0), beat(1, step, "other", steps=0))
    ranks.after(10)
    ranks.say(beat(0, step, "other", steps=0))
    assert ranks.after(seconds - 20) is None
    hang = ranks.after(40)
    assert hang is not None
    assert [rank.rank for rank in hang.ranks] == [1]


@pytest.mark.parametrize(
    "beats",
    [
        # An evaluation, a checkpoint, a tracker.
        (beat(0, 7, "other"), beat(1, 7, "other")),
        # The first step compiles.
        (beat(0, 1, "computing", steps=0), beat(1, 1, "computing", steps=0)),
        # One has compiled it, and the other has not.
        (beat(0, 1, "waiting", steps=0), beat(1, 1, "computing", steps=0)),
        # They load.
        (beat(0, -1, "other", steps=0), beat(1, -1, "other", steps=0)),
        # Steps were as long before.
        (beat(0, 7, "computing", longest_s=400.0), beat(1, 7, "waiting", longest_s=400.0)),
    ],
)
def test_what_takes_its_time_is_no_hang(beats: tuple[Beat, ...]) -> None:
    assert Ranks(*beats).after(5 * HANG_S) is None


def test_ranks_of_an_attempt_that_is_over_are_forgotten() -> None:
    ranks = Ranks(beat(0, 7, "waiting"), beat(1, 7, "computing"))
    ranks.after(HANG_S - 10)
    ranks.say(beat(0, 3, "other", attempt="b"))
    assert ranks.after(3 * HANG_S) is None
    # A late word of the first changes nothing, nor does the end of a rank, after which Ray acts.
    ranks.say(beat(0, 3, "other", attempt="b"), beat(1, 7, "computing"))
    assert ranks.after(10) is None
    assert ranks.pulses.hosts() == {"n0": "h0"}
    ranks.say(beat(0, 3, "gone", attempt="b"))
    assert ranks.after(3 * HANG_S) is None
    assert ranks.pulses.hosts() == {}


def test_a_connection_that_breaks_ends_no_watch(ranks_of_three: Ranks) -> None:
    """The rank makes another one; where it does not, it is silent."""
    ranks = ranks_of_three
    ranks.after(10)
    ranks.pulses.hear(beat(1, 7, "lost"), ranks.now)
    # It is back, and hangs later.
    hang = ranks.after(HANG_S + 20)
    assert hang is not None
    assert [one.rank for one in hang.ranks] == [1]


@pytest.fixture
def ranks_of_three() -> Ranks:
    return Ranks(beat(0, 7, "waiting"), beat(1, 7, "computing"), beat(2, 7, "waiting"))


def test_a_rank_that_does_not_come_back_is_named_and_processes_that_ended_are_not(ranks_of_three: Ranks) -> None:
    ranks = ranks_of_three
    ranks.say(*(replace(one, phase="other") for one in ranks.beats))
    ranks.after(10)
    ranks.pulses.hear(beat(1, 7, "lost"), ranks.now)
    others = [one for one in ranks.beats if one.rank != 1]
    ranks.say(*others)
    assert ranks.after(HANG_S - 20) is None
    hang = ranks.after(40)
    assert hang is not None
    assert ([one.rank for one in hang.ranks], hang.why) == ([1], "has not reported for 100 s")
    # Negative control: Ray has ended all, and takes its time to start them again.
    ranks = Ranks(*others)
    ranks.after(10)
    for one in others:
        ranks.pulses.hear(replace(one, phase="lost"), ranks.now)
    ranks.say()
    assert ranks.after(10 * HANG_S) is None


def started(*ranks: int) -> list[Beat]:
    """What Ray knows of workers."""
    return [replace(beat(rank, -1, "other", attempt=""), rank=UNKNOWN) for rank in ranks]


def test_a_worker_that_never_reports_is_named() -> None:
    ranks = Ranks(beat(0, -1, "waiting", steps=0))
    ranks.after(6)
    # Ray is asked now and then only, so rank 0 has waited for longer than the other is known.
    ranks.workers = started(0, 1)
    assert ranks.after(6 * HANG_S - 10) is None
    hang = ranks.after(20)
    assert hang is not None
    assert [named(one) for one in hang.ranks] == ["a worker (pid 101 on h1)"]
    assert hang.why == "has not reported since it started 600 s ago"
    # All of them.
    ranks = Ranks()
    ranks.workers = started(0, 1)
    hang = ranks.after(7 * HANG_S)
    assert hang is not None
    assert len(hang.ranks) == 2


def test_a_worker_that_reports_late_or_was_ended_is_not_named() -> None:
    ranks = Ranks()
    ranks.workers = started(0, 1)
    ranks.after(5 * HANG_S)
    # They report, and load for long.
    ranks.say(beat(0, -1, "other", steps=0), beat(1, -1, "other", steps=0))
    assert ranks.after(20 * HANG_S) is None
    # Others that start in their place have their own time.
    ranks.say()
    ranks.pulses.hear(beat(0, -1, "gone", steps=0), ranks.now)
    ranks.workers = started(2, 3)
    assert ranks.after(5 * HANG_S) is None
    # Control: the time of these is over.
    assert ranks.after(2 * HANG_S) is not None


def test_short_steps_do_not_shorten_the_time_to_start() -> None:
    pulses = Pulses(1.0)
    pulses.expect(started(0), 0.0)
    for now in range(300):
        pulses.hear(beat(1, -1, "computing", steps=0), float(now))
        assert pulses.hung(float(now)) is None


def test_a_rank_whose_end_failed_is_noticed_again() -> None:
    """Its process could not be ended, and the others still wait for it."""
    ranks = Ranks(beat(0, 7, "waiting"), beat(1, 7, "computing"))
    hang = ranks.after(2 * HANG_S)
    assert hang is not None
    ranks.pulses.ended(hang, ranks.now)
    assert ranks.after(HANG_S - 10) is None
    again = ranks.after(20)
    assert again is not None
    assert [one.rank for one in again.ranks] == [1]
    # Where it was ended, the others are ended by Ray, and nobody is named.
    ranks.pulses.ended(again, ranks.now)
    ranks.say()
    for one in (beat(0, 7, "lost"), beat(1, 7, "lost")):
        ranks.pulses.hear(one, ranks.now)
    assert ranks.after(3 * HANG_S) is None


def evaluating(share: float, part: str = "evaluating") -> Beat:
    return replace(beat(3, 40, "other", attempt=""), rank=EVALUATOR, part=part, share=share)


@pytest.mark.parametrize("said", [(), (evaluating(0.5),)])
def test_an_evaluation_that_stands_still_is_named(said: tuple[Beat, ...]) -> None:
    """It says nothing, or the same."""
    training = beat(0, 41, "other")
    ranks = Ranks(training, evaluating(0.4))
    ranks.after(HANG_S)
    ranks.say(training, evaluating(0.5))
    ranks.after(10)
    ranks.say(training, *said)
    assert ranks.after(5 * HANG_S) is None
    hang = ranks.after(2 * HANG_S)
    assert hang is not None
    assert [named(one) for one in hang.ranks] == ["the evaluation of step 40 (pid 103 on h3)"]
    assert hang.why == "has made no progress for 600 s"
    # It is ended, and the next one has its own time.
    ranks.pulses.ended(hang, ranks.now)
    ranks.say(training, replace(evaluating(0.5), pid=7))
    ranks.pulses.hear(evaluating(0.5), ranks.now)
    ranks.pulses.hear(replace(evaluating(0.5), phase="lost"), ranks.now)
    assert ranks.after(5 * HANG_S) is None
    assert ranks.after(2 * HANG_S) is not None


@pytest.mark.parametrize(
    "said", [evaluating(0.0, ""), evaluating(1.0, "answering prompts"), replace(evaluating(0.4), phase="gone")]
)
def test_an_evaluation_that_loads_scores_or_has_ended_is_not_named(said: Beat) -> None:
    ranks = Ranks(beat(0, 41, "other"), evaluating(0.4))
    ranks.after(10)
    ranks.pulses.hear(said, ranks.now)
    ranks.say(beat(0, 41, "other"), *([] if said.phase == "gone" else [said]))
    assert ranks.after(20 * HANG_S) is None


def test_a_driver_that_was_stopped_itself_blames_nobody() -> None:
    ranks = Ranks(beat(0, 7, "other"), beat(1, 7, "other"))
    ranks.after(10)
    assert ranks.pulses.hung(ranks.now + 10 * HANG_S) is None


def test_a_slow_rank_is_named_once() -> None:
    pulses = Pulses(HANG_S)
    fast = [beat(rank, 20, "other", steps=20, work_s=20.0) for rank in (0, 2)]
    for one in (*fast, beat(1, 20, "other", steps=20, work_s=50.0)):
        pulses.hear(one, 1.0)
    said = pulses.slow()
    assert said is not None
    assert (said.step, said.level) == (20, "warning")
    assert said.message.startswith(
        "rank 1 (pid 101 on h1) is slow: its part of a step takes 2.5 s, the others take 1 s"
    )
    assert pulses.slow() is None
    # Control: a little slower is not slow.
    pulses = Pulses(HANG_S)
    for one in (*fast, beat(1, 20, "other", steps=20, work_s=25.0)):
        pulses.hear(one, 1.0)
    assert pulses.slow() is None
    for one in fast:
        pulses.hear(replace(one, steps=2), 2.0)
    assert pulses.slow() is None


def test_the_pulse_counts_what_is_this_ranks_own() -> None:
    now = 0.0
    pulse = Pulse(lambda: now)
    for own, waited in ((2.0, 1.0), (3.0, 4.0)):
        pulse.begins(pulse.steps + 1)
        assert pulse.phase == "computing"
        now += own
        pulse.waits()
        assert pulse.phase == "waiting"
        now += waited
        pulse.ends()
    assert (pulse.step, pulse.steps, pulse.work_s, pulse.longest_s, pulse.phase) == (2, 2, 5.0, 7.0, "other")


def test_a_process_that_is_no_worker_is_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert examine(other.pid) == "the process is gone"
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
    assert examine(os.getpid()) == "the process is gone"
