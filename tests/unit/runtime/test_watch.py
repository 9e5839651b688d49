"""What the driver decides while a run is at work: when to stop, when to give up, what to say of waiting."""

from __future__ import annotations

import errno
import signal
import socket
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from finray.errors import ClusterError, TrainingError
from finray.planning.placement import Placement
from finray.records import Beat, EvalProgress, Note, Record, RunHeader, TrainRecord
from finray.runtime import watch as module
from finray.runtime.pulses import UNKNOWN, Hang
from finray.runtime.signals import Interrupted, Pending
from finray.runtime.watch import RunMonitor, is_refused, refusal, waiting_text, workers_wait

HEADER = RunHeader(**{field.name: 1 for field in fields(RunHeader)})  # type: ignore[arg-type]
STEP = TrainRecord(**{field.name: 9 for field in fields(TrainRecord)})  # type: ignore[arg-type]


class Run:
    """A watched run with a clock and a head process of its own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        head_patience_s: float = 4.0,
        placement: Placement = Placement(2, 3, use_gpu=True),  # noqa: B008
        **options: Any,
    ) -> None:
        self.now, self.head, self.stops = 0.0, True, 0
        # Whether a machine of the workers is lost, so that they wait for another one.
        self.is_short = False
        self.heard: list[Record] = []
        self.pending = Pending()

        def waits(ray: Any, group: str, what: str, *room: object) -> str | None:
            return f"waiting for {what}" if self.is_short or self.watch.began_at < 0 else None

        monkeypatch.setattr(module, "workers_wait", waits)
        self.watch = RunMonitor(
            None,
            "group",
            placement,
            self.pending,
            self.heard.append,
            grace_s=7.0,
            head=lambda: self.head,
            head_patience_s=head_patience_s,
            clock=lambda: self.now,
            **options,
        )
        self.has_workers = True
        self.watch.listener = self  # type: ignore[assignment]

    def stop(self) -> None:
        self.stops += 1

    def at(self, seconds: float) -> list[str]:
        """What is said until then."""
        said = len(self.heard)
        while self.now < seconds:
            self.now = min(seconds, self.now + 0.5)
            self.watch.poll()
        return [one.message for one in self.heard[said:] if isinstance(one, Note)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_head_that_ends_while_a_checkpoint_is_saved_is_missed_too(run: Run) -> None:
    """Nobody looks at it then, and tidying up without it would end the driver."""
    run.watch.on_record(HEADER)
    run.at(3)
    assert run.watch.reaches_head()
    run.pending.signum = signal.SIGTERM
    run.at(4)
    assert run.stops == 1
    run.head = False
    run.at(9)
    assert not run.watch.is_lost
    assert not run.watch.reaches_head()


def test_a_head_that_does_not_answer_is_said_at_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, head_patience_s=40.0)
    run.watch.on_record(HEADER)
    assert run.at(3) == []
    run.head = False
    missed = "Ray's head process does not answer; the run continues, and stops cleanly if this lasts 40 s"
    assert run.at(7) == [missed]
    assert run.at(30) == []
    run.head = True
    assert run.at(33) == ["Ray's head process answers again"]
    run.head = False
    assert run.at(70) == [missed]
    (ends,) = run.at(76)
    assert ends.startswith("Ray's head process is gone; saving a checkpoint")


def test_the_heartbeats_of_rank_0_show_how_an_evaluation_goes_on(run: Run) -> None:
    def beat(rank: int, part: str, phase: str = "other") -> Beat:
        return Beat("a", rank, "host", 1, "node", 7, phase, part=part, share=0.25)

    for one in (beat(0, ""), beat(0, "evaluating"), beat(1, "evaluating"), beat(0, "evaluating", "lost")):
        run.watch.on_record(one)
    assert run.heard == [EvalProgress(7, "evaluating", 0.25)]


def test_a_machine_that_goes_has_a_checkpoint_at_once_and_one_shortly_before(monkeypatch: pytest.MonkeyPatch) -> None:
    going: dict[str, int] = {}
    run = Run(monkeypatch, draining=lambda: going, wall=lambda: 1000 + run.now)
    asked: list[tuple[float, str]] = []
    run.ask = lambda request: asked.append((run.now, request))  # type: ignore[attr-defined]
    run.watch.on_record(HEADER)
    for rank, node in enumerate(["node-1", "node-2"]):
        run.watch.on_record(Beat("a", rank, f"host-{rank}", rank, node, 7, "computing"))
    assert run.at(10) == []
    # The last has no worker of this run.
    going |= {"node-2": 1_050_000, "node-3": 1_012_000}
    assert run.at(34) == ["host-1 is about to be removed: saving a checkpoint after this step"]
    (last,) = run.at(60)
    assert last.startswith("host-1 will be gone in 1")
    assert [request for _, request in asked] == ["save", "save"]
    assert asked[0][0] < 13
    assert 35 <= asked[1][0] < 38
    # One that goes at once, or where nobody says when, has one.
    going["node-1"] = 0
    assert run.at(70) == ["host-0 is about to be removed: saving a checkpoint after this step"]
    assert run.at(90) == []


@pytest.mark.parametrize("lacking", ["a first step", "workers", "a machine"])
def test_a_signal_while_nothing_can_be_saved_ends_the_run_at_once(run: Run, lacking: str) -> None:
    """A lost machine does not close its connection, so that it seems to be there."""
    if lacking != "a first step":
        run.watch.on_record(HEADER)
    run.at(5)
    run.has_workers = lacking != "workers"
    run.is_short = lacking == "a machine"
    # Not a connection that is broken for a moment.
    run.at(30 if lacking == "workers" else 5.5)
    run.pending.signum = signal.SIGTERM
    with pytest.raises(Interrupted) as caught:
        run.at(run.now + 0.5)
    assert (caught.value.exit_code, run.stops) == (143, 0)


def test_a_signal_in_training_stops_the_workers_once_and_ends_them_after_the_grace_period(run: Run) -> None:
    run.watch.on_record(HEADER)
    run.at(2)
    run.watch.on_record(STEP)
    run.pending.signum = signal.SIGINT
    assert run.at(2.5) == ["saving a checkpoint after this step, for at most 7 s (checkpoint.grace_seconds)"]
    assert run.at(9) == []
    assert run.stops == 1
    with pytest.raises(Interrupted) as caught:
        run.at(9.5)
    assert caught.value.exit_code == 130
    assert caught.value.late == STEP.step, "whoever tells what is saved can tell what is lost"


def test_a_run_that_fails_while_it_is_stopped_was_interrupted(run: Run) -> None:
    run.watch.raise_if_ending()
    run.pending.signum = signal.SIGTERM
    with pytest.raises(Interrupted):
        run.watch.raise_if_ending()


def test_a_raylet_that_is_gone_is_an_error_before_rays_core_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next call to that process would, with exit code 1 and without a message."""
    alive = [True]
    run = Run(monkeypatch, raylet=lambda: alive[0])
    run.watch.on_record(HEADER)
    assert run.at(10) == []
    alive[0] = False
    assert run.at(12) == []
    alive[0] = True
    assert run.at(20) == []
    alive[0] = False
    with pytest.raises(ClusterError, match=r"raylet.* is gone") as caught:
        run.at(24.5)
    assert "the same command continues" in str(caught.value.repair)


@pytest.mark.parametrize("ends", [True, False])
def test_a_head_process_that_is_gone_is_an_error_after_a_checkpoint(run: Run, ends: bool) -> None:
    """Workers that do not end have seven seconds for it."""
    run.watch.on_record(HEADER)
    run.at(10)
    run.head = False
    assert run.at(12) == []
    run.head = True
    assert run.at(30) == []
    run.head = False
    (saving,) = run.at(36)
    assert saving.startswith("Ray's head process is gone; saving a checkpoint after this step, for at most 7 s")
    run.has_workers = not ends
    with pytest.raises(ClusterError, match=r"(?s)is gone.*the same command"):
        run.at(60)
    assert run.now == (36.5 if ends else 39.5)


def test_waiting_is_said_after_ten_seconds_and_then_more_and_more_rarely(run: Run) -> None:
    assert run.at(9.5) == []
    assert run.at(10) == ["waiting for 2 workers of 3 CPUs, 1 GPU"]
    assert run.at(29.5) == []
    assert len(run.at(30)) == 1
    assert run.at(69.5) == []
    assert len(run.at(70)) == 1
    run.watch.on_record(HEADER)
    assert run.at(1000) == []


def test_workers_that_lose_a_machine_wait_and_that_is_said_after_ten_seconds_again(run: Run) -> None:
    """Also where the lost machine has not closed its connection; a moment between two placements is not said."""
    run.watch.on_record(HEADER)
    assert run.at(89) == []
    run.is_short = True
    assert run.at(99) == []
    run.is_short = False
    assert run.at(160) == []
    run.is_short = True
    assert run.at(170) == []
    assert run.at(175) == (waiting := ["waiting for 2 workers of 3 CPUs, 1 GPU"])
    assert run.at(194) == []
    assert run.at(195) == waiting


def test_workers_whose_number_may_change_wait_for_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, placement=Placement(4, 3, use_gpu=False, fewest=2, most=8))
    assert run.at(10) == ["waiting for at least 2 workers of 3 CPUs"]
    run = Run(monkeypatch, placement=Placement(4, 3, use_gpu=False, fewest=1, most=8))
    assert run.at(10) == ["waiting for at least 1 worker of 3 CPUs"]


@pytest.mark.parametrize("returns", [True, False])
def test_a_signal_while_a_connection_is_broken_waits_for_it_a_moment(run: Run, returns: bool) -> None:
    run.watch.on_record(HEADER)
    run.at(5)
    run.has_workers = False
    run.pending.signum = signal.SIGTERM
    assert run.at(6.5) == []
    if returns:
        run.has_workers = True
        assert run.at(7) == ["saving a checkpoint after this step, for at most 7 s (checkpoint.grace_seconds)"]
        assert run.stops == 1
    else:
        with pytest.raises(Interrupted):
            run.at(10)
        assert run.stops == 0


@pytest.mark.parametrize(
    ("states", "waits"),
    [(["PENDING"], True), ([], True), (["REMOVED"], True), (["REMOVED", "CREATED"], False), (["RESCHEDULING"], True)],
)
def test_workers_without_a_placement_wait(states: list[str], waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose fewest workers have no room asks for no placement group yet."""
    from finray.runtime import gcs

    table = {str(index): {"name": f"finray a {index}", "state": state} for index, state in enumerate(states)}
    table["other"] = {"name": "finray b 0", "state": "CREATED"}
    head = SimpleNamespace(gcs_address="head:6379")
    stand_in = SimpleNamespace(
        util=SimpleNamespace(placement_group_table=lambda: table), get_runtime_context=lambda: head
    )
    monkeypatch.setattr(module, "waiting_for", lambda ray, what: f"waiting for {what}")
    free = {"one": {"CPU": 1.0}, "another": {"CPU": 2.0}}
    monkeypatch.setattr(gcs, "available_resources", lambda address: free)
    assert (workers_wait(stand_in, "finray a", "x", {"CPU": 2}, 2) == "waiting for x") is waits
    # It waits for nothing where all that it wants is free.
    starting = "Ray has room for x, and is starting it"
    assert (workers_wait(stand_in, "finray a", "x", {"CPU": 2}, 1) == starting) is waits
    assert (workers_wait(stand_in, "finray a", "x", {"CPU": 1}, 3) == starting.removesuffix("it") + "them") is waits


def test_the_words_say_what_is_wanted_what_is_free_and_who_has_the_rest() -> None:
    held: list[tuple[str, dict[str, float]]] = [
        ("placement group finray other", {"CPU": 2, "GPU": 1, "memory": 5}),
        ("actor Server", {"CPU": 0.5}),
        ("actor Server", {"CPU": 0.5}),
        ("actor Idle", {}),
    ]
    total: dict[str, Any] = {"CPU": 4, "GPU": 1, "memory": 9}
    text = waiting_text("1 worker of 2 CPUs", total=total, free={"CPU": 1}, held=held)
    assert text == (
        "waiting for 1 worker of 2 CPUs: 1 of 4 CPUs, 0 of 1 GPUs are free; held by 2 x actor Server (0.5 CPUs), "
        "placement group finray other (2 CPUs, 1 GPU)"
    )


def test_the_words_say_which_node_has_room_and_which_is_gone() -> None:
    def node(number: int, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        names = {"NodeID": f"n{number}", "NodeManagerHostname": f"h{number}", "NodeManagerAddress": f"10.0.0.{number}"}
        return {**names, "Alive": alive, "Resources": resources}

    nodes = [node(1, CPU=4), node(2, CPU=4, GPU=1), node(3, alive=False)]
    cluster: dict[str, Any] = {"total": {"CPU": 8, "GPU": 1}, "free": {"CPU": 4, "GPU": 1}, "held": []}
    there = {"n1": {"CPU": 3.0}, "n2": {"CPU": 1.0, "GPU": 1.0}}
    text = waiting_text("3 workers of 4 CPUs", nodes=nodes, free_there=there, **cluster)
    assert text.endswith(
        "h1 (10.0.0.1) has 3 of 4 CPUs, h2 (10.0.0.2) has 1 of 4 CPUs, 1 of 1 GPUs; lost: h3 (10.0.0.3)"
    )
    # Negative control: one that came back is not lost, and one node alone is the cluster.
    back = [*nodes, {**node(3, CPU=4), "NodeID": "n4"}]
    assert "lost" not in waiting_text("x", nodes=back, free_there=there, **cluster)
    assert waiting_text("x", nodes=nodes[:1], free_there=there, **cluster) == waiting_text("x", **cluster)


def test_workers_that_hang_before_they_report_are_ended_and_twice_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, ended = [1], list[int]()

    def end(hang: Hang) -> list[str]:
        ended.extend(one.pid for one in hang.ranks)
        return ["it sleeps"]

    def workers() -> list[Beat]:
        return [Beat("", UNKNOWN, "h", pids[-1], "n", -1)]

    run = Run(monkeypatch, hang_s=100.0, end_hanging=end, workers=workers)
    monkeypatch.setattr(module, "workers_wait", lambda *about: None)
    assert run.at(600) == []
    named, seen = run.at(610)
    assert named.startswith("a worker (pid 1 on h) has not reported since it started 600 s ago; it is stopped")
    assert (seen, ended) == ("it sleeps", [1])
    # The next ones load; after their end, it happens again: that is the first time from there.
    pids.append(2)
    run.watch.on_record(Beat("b", 0, "h", 2, "n", -1))
    run.watch.on_record(HEADER)
    assert run.at(620) == []
    run.watch.on_record(Beat("b", 0, "h", 2, "n", -1, "gone"))
    pids.append(3)
    run.at(1240)
    assert ended == [1, 3]
    pids.append(4)
    with pytest.raises(TrainingError, match=r"hung 2 times before they had loaded: a worker \(pid 4 on h\)"):
        run.at(2000)
    assert ended == [1, 3, 4]


def test_a_rank_that_hangs_is_ended_once_the_head_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on another machine, where a task of Ray's ends it."""
    ended = list[int]()

    def end(hang: Hang) -> list[str]:
        ended.extend(one.pid for one in hang.ranks)
        return ["it sleeps"]

    run = Run(monkeypatch, head_patience_s=1000.0, hang_s=20.0, end_hanging=end)
    run.watch.on_record(HEADER)
    run.watch.on_record(Beat("a", 0, "h", 2, "n", 3, "computing", 2))
    run.head = False
    run.at(100)
    assert ended == []
    run.head = True
    run.at(110)
    assert ended == [2]


def test_who_trains_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that trains has reported; and Ray is asked for all actors each time."""
    asked = []
    run = Run(monkeypatch, hang_s=100.0, workers=lambda: asked.append(run.now) or [])  # type: ignore[func-returns-value]
    run.watch.on_record(HEADER)
    run.at(20)
    assert 0 < len(asked) <= 5
    run.watch.on_record(Beat("b", 0, "h", 2, "n", 3, "waiting", 2))
    before = len(asked)
    run.at(60)
    assert len(asked) == before
    forever = Run(monkeypatch, workers=lambda: asked.append(0.0) or [])  # type: ignore[func-returns-value]
    forever.at(60)
    assert len(asked) == before


def test_a_head_that_is_gone_is_not_asked_who_starts_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls would wait for it, and end the driver after a minute; a checkpoint may be due."""
    asked = []

    def ask(*_: object) -> list[Beat]:
        asked.append(run.now)
        return []

    run = Run(monkeypatch, head_patience_s=40.0, hang_s=100.0, workers=ask)
    monkeypatch.setattr(module, "workers_wait", ask)
    run.head = False
    with pytest.raises(ClusterError, match="Ray's head process"):
        run.at(60)
    assert asked == []


def test_an_address_says_whether_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert (refusal(address), is_refused(address)) == (None, False)
    assert (refusal(address), is_refused(address)) == ("connection refused", True)
    # These say nothing of the other side.
    for error in (TimeoutError(), OSError(errno.EMFILE, "Too many open files")):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert not is_refused(address)
