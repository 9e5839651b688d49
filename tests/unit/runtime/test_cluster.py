"""A cluster that does not answer is an error that says what was tried, before Ray tries for minutes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError
from finray.runtime import cluster
from tests.support import ports


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray other tests use is not there."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.5)
    # It would end that Ray, and this process with it.
    monkeypatch.setattr(cluster, "_all_ended", nullcontext)


def refused(config: ClusterConfig) -> ClusterError:
    with pytest.raises(ClusterError) as caught, cluster.connected(config):
        pass
    return caught.value


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody listens there."""
    with ports.reserved() as found:
        yield found


def test_one_of_several_processes_of_a_launcher_starts_no_ray_of_its_own(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """As with `torchrun`, or a platform with replicas: each would train the whole run."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    error = refused(ClusterConfig())
    assert "a launcher has started 4 processes (RANK=1, WORLD_SIZE=4)" in error.message
    assert "finray cluster up" in str(error.repair)
    # With an address, it would join that cluster.
    assert "connection refused" in refused(ClusterConfig(address=f"127.0.0.1:{port}")).message
    for alone in ({}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": ""}):
        cluster.require_one_process(alone)


@pytest.mark.parametrize("slow", [1, 2])
def test_a_ray_that_was_too_slow_to_start_is_started_once_more(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    starts = []

    def init(**options: Any) -> None:
        starts.append(options)
        if len(starts) <= slow:
            # As Ray says it: of no class of its own.
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if slow == 1:
        with cluster.connected(ClusterConfig()) as found:
            assert found is ray
    else:
        assert "the machine has too much else to do" in refused(ClusterConfig()).message
    assert len(starts) == 2


@pytest.mark.parametrize(("workers", "seconds"), [(1, "0.25"), (128, "0.25"), (512, "1"), (1024, "2")])
def test_many_workers_are_polled_more_rarely(workers: int, seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    name = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for given, expected in ((None, seconds), ("7", "7")):
        # Set first, so that what finray sets goes with the test.
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
        with cluster.connected(ClusterConfig(num_workers=workers)):
            assert os.environ[name] == expected


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    error = refused(ClusterConfig(address=f"127.0.0.1:{port}"))
    assert error.where == f"cluster.address=127.0.0.1:{port}"
    assert f":{port}: connection refused" in error.message
    assert "without cluster.address Ray is started on this machine" in str(error.repair)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    error = refused(ClusterConfig())
    assert error.where == f"RAY_ADDRESS=127.0.0.1:{port}"
    assert "without the variable" in str(error.repair)


def test_an_empty_address_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster.address_of(ClusterConfig()) is None
    assert cluster.address_of(ClusterConfig(address="auto")) == "auto"


NAMES = {"head": "10.0.0.1", "other": "10.0.0.2", "me": "127.0.1.1", "localhost": "127.0.0.1"}


@pytest.mark.parametrize(
    ("connected", "given", "differs"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379", False),
        ("10.0.0.1:6379", "head:6379", False),
        ("head:6379", "10.0.0.1:6379", False),
        ("10.0.0.1:6379", "auto", False),
        ("10.0.0.1:6379", "local", False),
        ("10.0.0.1:6379", None, False),
        ("10.0.0.1:6379", "other:6379", True),
        ("10.0.0.1:6379", "10.0.0.2:6379", True),
        ("10.0.0.1:6379", "head:6380", True),
        # As after `ray.init()` in a notebook: a Ray of this machine, at a port that it has chosen.
        ("192.168.0.7:51234", "head:6379", True),
        # This machine has several addresses.
        ("192.168.0.7:6379", "localhost:6379", False),
        ("192.168.0.7:6379", "172.17.0.1:6379", False),
        ("127.0.0.1:6379", "me:6379", False),
        ("192.168.0.7:6379", "127.0.0.1:6380", True),
        # A head may name an address that is on no interface of its machine.
        ("10.0.0.1:6379", "localhost:6379", False),
        # What cannot be resolved, or is no address of the head, is not compared.
        ("10.0.0.1:6379", "unknown:6379", False),
        ("10.0.0.1:6379", "[::1]:6379", False),
        ("10.0.0.1:6379", "ray://other:10001", False),
    ],
)
def test_a_connected_ray_that_is_another_than_the_config_names_is_an_error(
    connected: str, given: str | None, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil
    import ray

    def resolve(host: str) -> str:
        if host in NAMES:
            return NAMES[host]
        if host[0].isdigit():
            return host
        raise OSError("unknown")

    own = {name: [SimpleNamespace(address=one)] for name, one in (("eth0", "192.168.0.7"), ("docker0", "172.17.0.1"))}
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=connected))
    if differs:
        error = refused(ClusterConfig(address=given))
        assert error.where == f"cluster.address={given}"
        assert connected in error.message
        assert "ray.shutdown()" in str(error.repair)
    else:
        with cluster.connected(ClusterConfig(address=given)) as found:
            assert found is ray


@pytest.mark.parametrize(
    ("given", "host"), [("ray://head:10001", "head"), ("ray://[::1]:10001", "[::1]"), ("ray://", "HOST")]
)
def test_an_address_of_a_ray_client_names_the_one_to_use(
    given: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proxy has no table of placement groups and actors."""
    error = refused(ClusterConfig(address=given))
    assert error.where == f"cluster.address={given}"
    assert f"{host}:6379" in str(error.repair)
    monkeypatch.setenv("RAY_ADDRESS", given)
    assert refused(ClusterConfig()).where == f"RAY_ADDRESS={given}"


def test_somebody_who_listens_and_says_nothing() -> None:
    with socket.create_server(("", 0)) as server:
        error = refused(ClusterConfig(address=f"127.0.0.1:{server.getsockname()[1]}"))
    assert "is not a Ray head (deadline_exceeded)" in error.message


def test_the_last_ray_of_this_machine_where_there_is_none_or_no_more(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    from ray._private import services

    with monkeypatch.context() as nothing:
        nothing.setattr(services, "find_gcs_addresses", lambda: set())
        nothing.setattr(services, "find_bootstrap_address", lambda folder: None)
        assert "Could not find any running Ray instance" in refused(ClusterConfig(address="auto")).message
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert f":{port}: connection refused" in refused(ClusterConfig(address="auto")).message


@pytest.mark.parametrize("address", ["nonsense", "no-such-host.invalid:6379", "1.2.3.4:x"])
def test_what_is_no_address(address: str) -> None:
    assert refused(ClusterConfig(address=address)).where == f"cluster.address={address}"


def test_groups_of_ended_drivers_are_removed_and_no_others() -> None:
    def group(name: str, state: str = "CREATED") -> dict[str, Any]:
        return {"name": name, "state": state}

    groups = {
        "aa01000000": group("finray my run 0123abcd 4567cdef"),
        "bb01000000": group("finray-replicas 0123abcd", "PENDING"),
        "cc01000000": group("finray my run 0123abcd 89abcdef", "REMOVED"),
        "dd01000000": group("somebody else's"),
        "ee01000000": group("finrays"),
        "ff02000000": group("finray other 0123abcd 4567cdef"),
        # Of a job that Ray's table does not have.
        "0003000000": group("finray third 0123abcd 4567cdef"),
    }
    assert cluster.orphans(groups, {"01000000"}) == ["aa01000000", "bb01000000"]
    assert cluster.orphans(groups, ()) == []


def test_only_a_head_that_listens_is_found_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert cluster.running_here() is None
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(f"127.0.0.1:{server.getsockname()[1]}", encoding="utf-8")
        assert cluster.running_here() == file.read_text()
    assert cluster.running_here() is None
    file.write_text("no address", encoding="utf-8")
    assert cluster.running_here() is None


def test_a_head_that_goes_away_between_two_requests_is_named() -> None:
    from finray.runtime import gcs

    with (
        ports.reserved() as port,
        pytest.raises(ClusterError, match="does not answer") as caught,
        gcs.answering(where="here"),
    ):
        gcs.available_resources(f"127.0.0.1:{port}")
    assert caught.value.where == "here"
