"""What `finray cluster` decides, without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from finray.errors import ClusterError
from finray.runtime import nodes, status
from finray.runtime.token import require_token

SLOW = "Exception: The current node timed out during startup. This could happen because\n"
HEAD = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu", "transformers": "5.23.0", "finray": "0.1.0"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"torch": "2.13.0+cu128", "python": "3.11.2"}, []),
        ({"torch": "2.12.0+cpu"}, ["torch 2.12.0+cpu (the head has 2.13.0+cpu)"]),
        ({"python": "3.12.7"}, ["python 3.12.7 (the head has 3.11.7)"]),
        ({"ray": "2.59.0", "finray": "none"}, ["ray 2.59.0 (the head has 2.60.0)", "finray none (the head has 0.1.0)"]),
    ],
)
def test_versions_differ_where_releases_do(changed: dict[str, str], said: list[str]) -> None:
    assert nodes.differences({**HEAD, **changed}, HEAD) == said


def test_versions_survive_rays_labels() -> None:
    from ray._private.label_utils import parse_node_labels_string

    assert nodes.versions_in(parse_node_labels_string(nodes.labels_of(HEAD))) == HEAD
    assert nodes.versions_in({"of": "others"}) == {}


def test_a_token_is_made_once_and_must_be_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "of" / "ray" / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(ClusterError, match="there is none in"):
        require_token(where="join", create=False)
    assert require_token(where="up", create=True)
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    assert len(token) == 64
    assert not require_token(where="up", create=True)
    assert file.read_text() == token
    file.chmod(0o640)
    with pytest.raises(ClusterError, match="others on this machine can read the token"):
        require_token(where="up", create=True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    assert not require_token(where="join", create=False)


def test_a_process_is_known_by_when_it_started() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        started = psutil.Process(other.pid).create_time()
        assert [one.pid for one in nodes._alive([(other.pid, started)])] == [other.pid]
        # The number of a process that ended before another one got it.
        assert nodes._alive([(other.pid, started - 60)]) == []
        other.kill()
    assert nodes._alive([(other.pid, started)]) == []


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.1", "10.0.0.1:6379"),
        ("head", "head:6379"),
        ("head:7000", "head:7000"),
        ("[::1]:7000", "[::1]:7000"),
        ("[::1]", "[::1]:6379"),
        # Ray looks for the one of this machine.
        ("auto", "auto"),
    ],
)
def test_the_port_of_a_head_may_be_left_out(given: str, address: str) -> None:
    assert nodes.with_port(given) == address


def node(number: int, *, alive: bool = True, **labels: str) -> dict[str, Any]:
    head = {"node:__internal_head__": 1.0} if number == 1 else {}
    return {
        "NodeID": f"id{number}",
        "Alive": alive,
        "NodeName": f"10.0.0.{number}",
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"m{number}",
        "Resources": {"CPU": 8.0, "memory": 2.0**34, "object_store_memory": 1.0, **head},
        "Labels": labels,
    }


def labels(changed: dict[str, str] | None = None) -> dict[str, str]:
    return {f"finray/{name}": value.replace("+", "__") for name, value in {**HEAD, **(changed or {})}.items()}


def test_a_status_says_who_is_where_and_what_is_wrong() -> None:
    known = [node(3), node(2, **labels({"torch": "2.12.0+cpu"})), node(1, **labels()), node(4, alive=False)]
    # Node 2 was gone for a while: to Ray, it is another one.
    known.append({**node(2, alive=False), "NodeID": "before"})
    # As the driver names a placement group, without and with what is added for each start of the workers.
    actors = [("id2", "finray my run 0123abcd"), ("id2", "finray my run 0123abcd 4567cdef"), ("id1", "Somebody")]
    found = status.status_of("m1:6379", known, {"id1": {"CPU": 6.0}, "id2": {}, "id3": {"CPU": 8.0}}, actors)
    assert [(one.name, one.is_head, one.runs) for one in found.nodes] == [
        ("m1", True, {"Somebody": 1}),
        ("m2", False, {"run my run": 2}),
        ("m3", False, {}),
    ]
    assert found.lost == ["m4 (10.0.0.4)"]
    assert found.complaints == [
        "m2 has torch 2.12.0+cpu (the head has 2.13.0+cpu)",
        "m3 was not started by finray: its versions are not known",
        "m4 (10.0.0.4) is lost or has left",
    ]
    shown = found._repr_mimebundle_()["text/plain"]
    assert "run my run (2)" in shown
    assert "2 of 8" in shown
    assert "3 nodes with 24 CPUs, 0 GPUs at m1:6379" in shown


def test_a_directory_that_others_could_have_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.tempfile, "gettempdir", lambda: str(tmp_path))
    assert nodes.running() is None
    nodes.state_dir().chmod(0o755)
    with pytest.raises(ClusterError, match="other users have access"):
        nodes.running()


class Starts:
    """Stands for the start of a node: fails with what Ray says, as often as there is something to say."""

    def __init__(self, *said: str) -> None:
        self.said = [*said]
        self.count = 0

    def __call__(self, address: str, words: list[str], log: Path, keep: Any, *, where: str) -> psutil.Process:
        self.count += 1
        if not self.said:
            return psutil.Process()
        log.write_text(self.said.pop(0), encoding="utf-8")
        raise ClusterError("Ray did not start", where=where)


@pytest.mark.parametrize(
    ("said", "starts", "works"),
    [([], 1, True), ([SLOW], 2, True), ([SLOW, SLOW], 2, False), (["Exception: port 6380 is in use"], 1, False)],
)
def test_a_node_that_was_too_slow_for_ray_is_started_once_more(
    said: list[str], starts: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(nodes, "_run_node", started := Starts(*said))
    if works:
        assert nodes._start("m1:6379", "m1", [], [], where="up").processes
        assert nodes.running() is not None
    else:
        with pytest.raises(ClusterError, match="Ray did not start"):
            nodes._start("m1:6379", "m1", [], [], where="up")
    assert started.count == starts


def test_a_node_is_known_to_down_before_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster up` may be killed while it waits for Ray."""
    monkeypatch.setattr(nodes.tempfile, "gettempdir", lambda: str(tmp_path))
    ended: list[int] = []

    def never(address: str, mark: str) -> bool:
        found = nodes.running()
        assert found is not None
        assert (found.address, found.is_head) == ("m1:6379", True)
        ended.append(nodes.down())
        return False

    popen = nodes.subprocess.Popen
    monkeypatch.setattr(nodes.subprocess, "Popen", lambda words, **options: popen(["sleep", "60"], **options))
    monkeypatch.setattr(nodes, "_is_known", never)
    with pytest.raises(ClusterError, match="Ray did not start: it said nothing"):
        nodes._start("m1:6379", "m1", [], [], where="up", is_head=True)
    assert ended == [1]
    assert not (nodes.state_dir() / "node.json").exists()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Words of the nodes' processes, which are known as soon as somebody asks for what they were given."""
    monkeypatch.setattr(nodes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    found: list[list[str]] = []
    popen = nodes.subprocess.Popen

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        found.append(words)
        # As Ray: of an option that is given twice, the last value counts.
        mark = [word for word in words if word.startswith("--labels")][-1].rpartition("finray/node=")[2]
        known.append({"is_head": True, "alive": True, "labels": {"finray/node": mark}})
        return popen(["true"], **options)

    def known_at(address: str, *, where: str) -> list[dict[str, Any]]:
        asked.append(address)
        return known

    known, asked = list[dict[str, Any]](), list[str]()
    monkeypatch.setattr(nodes, "_START_S", 1.0)
    monkeypatch.setattr(nodes.subprocess, "Popen", start)
    monkeypatch.setattr(nodes, "gcs_nodes", known_at)
    monkeypatch.setattr(nodes, "_family", lambda processes: processes)
    found.append(asked)
    return found


@pytest.mark.parametrize("labels", [["--labels=zone=a,gpu=b"], ["--labels", "zone=a", "--labels=gpu=b"]])
def test_labels_of_the_user_are_added_to_those_of_finray(started: list[list[str]], labels: list[str]) -> None:
    from ray._private.label_utils import parse_node_labels_string

    nodes.up(host="127.0.0.1", options=[*labels, "--num-cpus=2"])
    (words,) = started[1:]
    (given,) = (word.partition("=")[2] for word in words if word.startswith("--labels"))
    found = parse_node_labels_string(given)
    assert (found["zone"], found["gpu"]) == ("a", "b")
    assert nodes.versions_in(found) == nodes.versions()
    assert "--num-cpus=2" in words


@pytest.mark.parametrize("port", [["--port=7000"], ["--port", "6999", "--port", "7000"]])
def test_a_head_is_asked_on_the_port_that_it_was_given(started: list[list[str]], port: list[str]) -> None:
    found, _ = nodes.up(host="127.0.0.1", options=port)
    assert found.address == "127.0.0.1:7000"
    assert set(started[0]) == {"127.0.0.1:7000"}


@pytest.mark.parametrize("options", [["--address=m2:6379"], ["--node-ip-address", "10.0.0.9"], ["--port=0"]])
def test_an_option_with_which_finray_would_not_find_the_node_is_refused_before_anything_starts(
    started: list[list[str]], options: list[str]
) -> None:
    for start in (nodes.up, partial(nodes.join, "m1")):
        with pytest.raises(ClusterError, match=options[0].partition("=")[0]):
            start(options=options)
    assert started == [[]]


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """What stands for a node's process, with a worker of a training below it."""
    monkeypatch.setattr(nodes.tempfile, "gettempdir", lambda: str(tmp_path))
    # The worker does not end with its parent, as one of Ray's does.
    monkeypatch.setattr(nodes, "_END_S", 0.2)
    worker = "exec -a ray::RayTrainWorker sleep 3600"
    process = subprocess.Popen(["bash", "-c", f"({worker}) & exec sleep 3600"], start_new_session=True)
    found = nodes.Running("m1:6379", "10.0.0.2", False, [(process.pid, psutil.Process(process.pid).create_time())], "")
    deadline = time.monotonic() + 300
    while not any(map(nodes._trains, nodes._family([psutil.Process(process.pid)]))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (nodes.state_dir() / "node.json").write_text(json.dumps(asdict(found)))
    yield process
    # The worker too, where the test leaves it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("within_s", "has_waited"), [(60.0, True), (0.2, False), (60.0, None)])
def test_runs_are_told_that_a_machine_goes_and_have_time(
    joined: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, within_s: float, has_waited: bool | None
) -> None:
    """None: nobody can be told, and the machine goes all the same."""
    announced: list[tuple[object, ...]] = []
    left: list[bool] = []

    def announce(*given: object, where: str) -> None:
        announced.append(given)
        if has_waited is None:
            raise ClusterError("the head does not answer", where=where)
        if has_waited:
            # Ends a little later.
            worker = next(filter(nodes._trains, nodes._family([psutil.Process(joined.pid)])))
            threading.Timer(0.7, worker.kill).start()

    monkeypatch.setattr(nodes, "announce_end", announce)
    end = nodes._end

    def ends(processes: Sequence[Any]) -> int:
        left.append(any(map(nodes._trains, nodes._family(processes))))
        return end(processes)

    monkeypatch.setattr(nodes, "_end", ends)
    notes: list[str] = []
    assert nodes.down(within_s=within_s, notify=notes.append)
    assert announced == [("m1:6379", "10.0.0.2", within_s)]
    # Within its time the worker has ended by itself; where that is over, the node ends with it.
    assert left == [not has_waited]
    assert ("the head does not answer" in notes[0]) == (has_waited is None)
    assert not psutil.pid_exists(joined.pid)


def test_a_head_does_not_go_before_its_runs(joined: subprocess.Popen[bytes]) -> None:
    file = nodes.state_dir() / "node.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_head": True}))
    with pytest.raises(ClusterError, match="all runs of its cluster end with it"):
        nodes.down(within_s=60)
    assert joined.poll() is None
    assert nodes.running() is not None


def test_ray_still_says_that_it_was_too_slow() -> None:
    from ray._private import node

    assert nodes.GAVE_UP in Path(node.__file__).read_text(encoding="utf-8")


def test_a_lost_node_is_given_up_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    for name in nodes.HEALTH_ENV:
        monkeypatch.delenv(name, raising=False)
    # One that it does not know Ray would ignore silently.
    server = (Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server").read_bytes()
    assert all(name.encode() in server for name in nodes.HEALTH_ENV)
    period, timeout, times = (int(value) for value in nodes.HEALTH_ENV.values())
    assert 10_000 < (period + timeout) * times < 20_000
    assert nodes.HEALTH_ENV.items() <= nodes.environment().items()
    users = {"RAY_health_check_timeout_ms": "20000", "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "elsewhere:6379"}
    for name, value in (users | {"PATH": "/usr/bin"}).items():
        monkeypatch.setenv(name, value)
    environment = nodes.environment()
    assert environment["RAY_health_check_timeout_ms"] == "20000"
    assert environment["RAY_health_check_period_ms"] == "1000"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_ADDRESS" not in environment
    # A job is started by `python ...`, and an environment that was not activated is not in the path.
    python = shutil.which("python", path=environment["PATH"])
    assert python is not None
    assert Path(python).parent == Path(sys.executable).parent
