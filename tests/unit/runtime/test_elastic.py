"""With how many workers a group starts, and what a wish to grow does to those that are at work."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from finray.records import Beat, Note
from finray.runtime.failures import OutOfMemory, WouldRepeat
from finray.runtime.progress import RESIZE, STOP, Listener, Sender, progress_of, resize_to
from finray.runtime.pulses import EVALUATOR
from tests.unit.runtime.test_progress import wish_of
from tests.unit.runtime.test_watch import HEADER, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


@pytest.mark.parametrize(
    ("possible", "fewest", "expected", "waited_s", "count"),
    [
        (4, 1, 4, 0.0, 4),
        # What the workers before have left is not free yet.
        (1, 1, 4, 0.0, None),
        (1, 1, 4, 10.0, 1),
        (1, 2, 2, 99.0, None),
        (5, 2, 2, 0.0, 5),
    ],
)
def test_workers_to_start(possible: int, fewest: int, expected: int, waited_s: float, count: int | None) -> None:
    from finray.runtime.elastic import workers_to_start

    assert workers_to_start(possible, fewest=fewest, expected=expected, waited_s=waited_s) == count


class Cluster:
    """Stands for what Ray says of a cluster of three machines with two CPUs each, of which a run holds two."""

    def __init__(self, state: str, places: dict[int, str]) -> None:
        self.gcs_address = "head:6379"
        self.held = {
            "mine": {"name": "finray run 1", "state": state, "bundles": {0: TWO, 1: TWO}, "bundles_to_node_id": places},
            "old": {"name": "finray run 0", "state": "REMOVED", "bundles": {0: TWO}, "bundles_to_node_id": {0: "a"}},
            "other": {"name": "other", "state": "CREATED", "bundles": {0: TWO}, "bundles_to_node_id": {0: "a"}},
        }

    def get_runtime_context(self) -> Cluster:
        return self


class Head:
    """Stands for :mod:`finray.runtime.gcs`."""

    def __init__(self, free: dict[str, dict[str, float]], leaving: dict[str, int] | None = None) -> None:
        self.available_resources = lambda address: free
        self.draining = lambda address: leaving or {}


TWO = {"CPU": 2.0}


@pytest.mark.parametrize(
    ("state", "places", "nodes", "room"),
    [
        ("CREATED", {0: "a", 1: "b"}, "abc", 3),
        ("CREATED", {0: "a", 1: "b"}, "ab", 2),
        # A machine is lost, and Ray does not know it yet; then it does, and looks for another place.
        ("CREATED", {0: "a", 1: "b"}, "bc", 2),
        ("RESCHEDULING", {0: "", 1: "b"}, "bc", 2),
        ("RESCHEDULING", {0: "", 1: "b"}, "b", 1),
        # Not placed yet, or not any more.
        ("PENDING", {0: "", 1: ""}, "abc", 1),
        ("REMOVED", {0: "a", 1: "b"}, "abc", 1),
    ],
)
def test_a_run_has_room_where_it_holds_resources_and_where_they_are_free(
    state: str, places: dict[int, str], nodes: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finray.runtime import elastic

    cluster = Cluster(state, places)
    free = {"a": {"memory": 9.0}, "b": {"memory": 9.0}, "c": {"CPU": 2.0, "memory": 9.0}}
    monkeypatch.setattr(elastic, "ray", cluster)
    monkeypatch.setattr(elastic, "gcs", Head(free))
    monkeypatch.setattr(elastic, "placement_group_table", lambda: cluster.held)
    assert elastic.room_for(TWO, nodes=set(nodes), group="finray run", most=8, kept=0) == room


@pytest.mark.parametrize(
    ("free", "evaluates", "asked"),
    [
        # The evaluator holds the CPUs of one machine, and another one joins.
        ({"d": 2.0}, True, [3]),
        ({"c": 2.0, "d": 2.0}, False, [3]),
        # What is left for the next evaluation is no room for a worker.
        ({"c": 2.0}, False, []),
        ({}, True, []),
    ],
)
def test_a_machine_that_joins_gets_a_worker_whether_or_not_an_evaluation_is_running(
    free: dict[str, float], evaluates: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train import ScalingConfig

    from finray.runtime import elastic

    cluster = Cluster("CREATED", {0: "a", 1: "b"})
    node = {"Alive": True, "Resources": TWO, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    cluster.nodes = lambda: [{**node, "NodeID": one} for one in "abcd"]  # type: ignore[attr-defined]
    monkeypatch.setattr(elastic, "ray", cluster)
    monkeypatch.setattr(elastic, "gcs", Head({name: {"CPU": free.get(name, 0.0)} for name in "abcd"}))
    monkeypatch.setattr(elastic, "placement_group_table", lambda: cluster.held)
    monkeypatch.setattr(elastic, "refusal", lambda address: None)
    run, counts = Run(monkeypatch), list[int]()
    if evaluates:
        run.watch.on_record(Beat("", EVALUATOR, "host", 1, "c", 4, "other"))
    with Listener("127.0.0.1", run.watch.on_record, counts.append, is_evaluating=run.watch.is_evaluating) as listener:
        policy = elastic.Elastic(
            ScalingConfig(num_workers=(1, 8), resources_per_worker=TWO, elastic_resize_monitor_interval_s=0),
            group="finray run",
            listener=listener.address,
            expected=2,
            evaluator=True,
            autoscaled=False,
        )
        policy.make_decision_for_running_worker_group(SimpleNamespace(num_workers=2), None)
    assert counts == asked


def test_a_machine_that_accepts_no_connection_is_silent() -> None:
    from finray.runtime.elastic import silent

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        here, gone = (f"127.0.0.1:{one.getsockname()[1]}" for one in (server, other))
        assert silent({"a": here, "b": gone}) == set()
        other.close()
        assert silent({"a": here, "b": gone}) == {"b"}
    assert silent({}) == set()


def test_a_controller_asks_the_driver_how_far_the_run_has_come_and_says_that_there_is_room(run: Run) -> None:
    """With the token, and while the driver is there."""
    counts: list[int] = []
    with Listener("127.0.0.1", run.watch.on_record, counts.append, lambda: run.watch.began_at) as listener:
        wrong = replace(listener.address, token="0" * 32)
        assert progress_of(listener.address) == -1
        for step in (0, 20):
            run.watch.on_record(replace(HEADER, step=step))
            assert progress_of(listener.address) == step
        assert resize_to(listener.address, 3)
        assert (progress_of(wrong), resize_to(wrong, 4)) == (-1, False)
    assert (progress_of(listener.address), resize_to(listener.address, 5)) == (-1, False)
    assert counts == [3]


def test_wishes_come_to_the_worker_once() -> None:
    heard: list[object] = []
    with Listener("127.0.0.1", heard.append) as listener:
        sender = Sender(listener.address)
        assert (sender.has_request(), sender.take_request()) == (False, "")
        sender.put(Note("hello"))
        listener.stop()
        assert wish_of(sender) == STOP
        sender.put(Note("there"))
        listener.ask(RESIZE)
        assert wish_of(sender) == RESIZE
        assert (sender.has_request(), sender.take_request()) == (False, "")
        sender.close()


def test_a_group_makes_place_unless_the_run_is_ending_and_that_is_said_once(run: Run) -> None:
    """Workers that evaluate or load are asked again, because a request may be lost with a connection."""
    asked: list[str] = []
    run.ask = asked.append  # type: ignore[attr-defined]
    run.watch.resize(3)
    assert asked == []
    run.watch.on_record(HEADER)
    for count in (3, 3, 4, 4):
        run.watch.resize(count)
    run.watch.on_record(HEADER)
    run.watch.resize(4)
    notes = [note.message.partition(":")[0] for note in run.heard if isinstance(note, Note)]
    assert notes == [f"there is room for {count} workers" for count in (3, 4, 4)]
    assert asked == [RESIZE] * 5
    run.pending.signum = 15
    run.at(1)
    run.watch.resize(4)
    assert asked == [RESIZE] * 5


def test_which_failures_count() -> None:
    """Those in a row without progress between them; one that makes place is none, and memory is no bad luck."""
    from ray.train import FailureConfig
    from ray.train.v2._internal.execution.failure_handling import FailureDecision
    from ray.train.v2.api.exceptions import WorkerGroupError

    from finray.runtime.elastic import Failures, Resize

    def after(error: Exception) -> FailureDecision:
        return policy.make_decision(WorkerGroupError("failed", {0: error, 1: error}))

    retry, end = FailureDecision.RETRY, FailureDecision.RAISE
    steps = [0]
    policy = Failures(FailureConfig(max_failures=2), lambda: steps[-1])
    assert [after(ValueError()), after(Resize()), after(ValueError())] == [retry] * 3
    steps.append(4)
    assert [after(ValueError()), after(ValueError()), after(Resize()), after(ValueError())] == [
        retry,
        retry,
        retry,
        end,
    ]
    for certain in (OutOfMemory("no"), WouldRepeat("no")):
        policy = Failures(FailureConfig(max_failures=2), lambda: 0)
        assert policy.make_decision(WorkerGroupError("failed", {0: certain, 1: ValueError()})) == end


def test_workers_that_die_while_they_start_count_and_a_wait_for_room_does_not() -> None:
    """Ray Train counts both by themselves, and without a limit."""
    from ray.train import FailureConfig
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.failure_handling import FailureDecision
    from ray.train.v2.api.exceptions import ControllerError

    from finray.runtime.elastic import Failures

    policy = Failures(FailureConfig(max_failures=2), lambda: -1)
    died = ControllerError(WorkerGroupStartupFailedError("a worker died"))
    waited = ControllerError(WorkerGroupStartupTimeoutError(2))
    retry, end = FailureDecision.RETRY, FailureDecision.RAISE
    assert [policy.make_decision(one) for one in (died, waited, waited, died, waited, died)] == [retry] * 5 + [end]
