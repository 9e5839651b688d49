"""Connecting to Ray, and whether a run's workers can be placed."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.config.environment import set_default
from finray.config.schema import ClusterConfig, Config
from finray.config.trust import require_trusted
from finray.errors import ClusterError
from finray.runtime import signals, token, watch

if TYPE_CHECKING:
    from finray.planning.result import Plan

OBJECT_STORE_BYTES = 256 * 2**20
# In total less than the 15 s after which an unresponsive cluster is an error.
_CONNECT_S, _ANSWER_S = 4.0, 8.0
_END_S = 2.0
# What Ray says when its node takes longer than the 30 s that its code allows (Ray 2.60, `_private/node.py`).
GAVE_UP = "timed out during startup"

# For a Ray of our own on this machine: authentication by token, no usage reports, no collection of what only a
# dashboard reads, and no watch for preemption. Workers do not yield to Ray's own processes: a step of several threads
# waits for the slowest one.
LOCAL_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_event_stats": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # `start_worker_processes` starts processes, with the environment that they need.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_preload_python_modules": "finray.runtime.preload",
}

# Those of them that leave a dashboard without content.
_FOR_NO_DASHBOARD = ("RAY_enable_metrics_collection", "RAY_event_stats", "RAY_task_events_report_interval_ms")


def address_of(cluster: ClusterConfig) -> str | None:
    """The address of the cluster that a config or the environment names; None for a Ray of our own."""
    # To Ray, too, an empty variable is none.
    return cluster.address or os.environ.get("RAY_ADDRESS") or None


def starts_one(cluster: ClusterConfig) -> bool:
    """Whether :func:`connected` will start a Ray of our own."""
    ray = sys.modules.get("ray")
    return address_of(cluster) is None and not (ray is not None and ray.is_initialized())


def require_one_process(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to start a Ray in one of several processes that a launcher has started, such as ``torchrun``.
    Raises ClusterError: each of them would train the whole run by itself."""
    size = environ.get("WORLD_SIZE", "")
    if "RANK" in environ and size.isdecimal() and int(size) > 1:
        raise ClusterError(
            f"a launcher has started {size} processes (RANK={environ['RANK']}, WORLD_SIZE={size}), and each of them "
            "would train the whole run by itself",
            where="cluster.address",
            repair="start `finray train` once, and let finray start the workers: on several machines after `finray "
            "cluster up` and `join`, with cluster.address=auto; if this is the only process, unset RANK and WORLD_SIZE",
        )


def running_here() -> str | None:
    """The address of a living Ray head that was last started on this machine, if its file names one; without Ray, whose
    core would read the environment too early."""
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    with suppress(OSError, ValueError):
        address = file.read_text(encoding="utf-8").strip()
        if address and watch.refusal(address, timeout=0.3) is None:
            return address
    return None


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[Any]:
    """Ray, connected to the configured cluster or started on this machine; disconnected or shut down afterwards.

    A Ray that finray starts requires a token and has no dashboard. Raises ClusterError: the cluster cannot be reached,
    this process is connected to another one, or one is to be started in each process of a launcher.
    """
    if starts_one(cluster):
        require_one_process()
    with signals.owned(), _connected(cluster) as ray:
        yield ray


@contextmanager
def _connected(cluster: ClusterConfig) -> Iterator[Any]:
    address = address_of(cluster)
    # Ray forks to start its processes. By default tokenizers would warn at each fork and disable its threads from then
    # on.
    set_default("TOKENIZERS_PARALLELISM", "true")
    # Ray Train polls all workers every two seconds by default, and a report waits for that. A poll costs its controller
    # some 0.5 ms per worker: beyond 128 workers it polls more rarely, and with 1,024 as by default.
    set_default("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{max(0.25, 2 * cluster.max_workers / 1024):g}")
    # Ray 2.60 warns about a change of defaults that does not affect us.
    set_default("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        for name, value in LOCAL_RAY.items():
            if not (cluster.dashboard and name in _FOR_NO_DASHBOARD):
                set_default(name, value)
        if os.environ["RAY_AUTH_MODE"] == "token" and cluster.dashboard:
            # A random token would be known to nobody who opens the page.
            token.require_token(where="cluster.dashboard=true", create=True)
        elif os.environ["RAY_AUTH_MODE"] == "token":
            set_default("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # In a notebook it would ask to install ipywidgets for what finray does not show.
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    was_imported = "ray" in sys.modules
    import ray

    if ray.is_initialized():
        if cluster.address and not _may_be(cluster.address, at := ray.get_runtime_context().gcs_address):
            raise ClusterError(
                f"this process is connected to another Ray cluster, at {at}",
                where=f"cluster.address={cluster.address}",
                repair="call `ray.shutdown()` first, or leave cluster.address out to use the connected one",
            )
        yield ray
        return
    if was_imported:
        # Ray's core read RAY_AUTH_MODE when it was loaded, as in a notebook that imports Ray first.
        token.read_again()
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": bool(os.environ.get("FINRAY_VERBOSE"))}
    if address is None:
        options |= {"address": "local", "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": cluster.dashboard, "dashboard_host": "127.0.0.1"}
    else:
        require_alive(address, where=_where(cluster, address))
        options["address"] = address
    try:
        observed = address is not None or options["log_to_driver"] or cluster.dashboard
        with _without_handlers(), nullcontext() if observed else _without_observers():
            _start(ray, options)
        signals.take_back()
        yield ray
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        raise _unreachable(str(error).splitlines()[0], where=_where(cluster, address)) from None
    finally:
        with _all_ended() if address is None else nullcontext():
            ray.shutdown()
        # Ray's core leaves the default handler behind: SIGTERM would end this process silently.
        signals.take_back()


def _may_be(address: str, connected: str) -> bool:
    """Whether an address may be that of the connected head: a machine has several, and not all of them are known."""
    import psutil

    if address == connected or "://" in address or not re.fullmatch(r".+:\d+", address):
        return True
    (host, _, port), (other, _, other_port) = address.rpartition(":"), connected.rpartition(":")
    if port != other_port:
        return False
    try:
        hosts = {socket.gethostbyname(host), socket.gethostbyname(other)}
    except (OSError, ValueError):
        return True
    local = {entry.address for several in psutil.net_if_addrs().values() for entry in several}
    return len(hosts) == 1 or any(ipaddress.ip_address(host).is_loopback for host in hosts) or hosts <= local


def _start(ray: Any, options: Mapping[str, Any]) -> None:
    """Connect; a Ray of our own is started once more if the machine was too slow for it.
    Raises ClusterError: it was too slow again."""
    for is_last in (False, True):
        try:
            with signals.without_hangup():
                ray.init(**options)
            return
        except Exception as error:
            if GAVE_UP not in str(error):
                raise
            # The second start is faster: the files that it reads are in memory.
            with _all_ended():
                ray.shutdown()
            if is_last:
                raise ClusterError(
                    "Ray did not start on this machine within 30 s, twice: the machine has too much else to do",
                    repair="run the same command again when it has less",
                ) from None


@contextmanager
def _without_handlers() -> Iterator[None]:
    """Keep Ray from installing its SIGTERM handler, with which a start would end with exit code 15.

    The handler that its core sets in C++ would end this process by SIGABRT. Signals are blocked only while the core
    starts: a process started meanwhile would inherit the mask. The names are private in Ray 2.60.
    """
    from ray._private import utils, worker

    before, connect = utils.set_sigterm_handler, worker.connect

    def connect_undisturbed(*given: Any, **named: Any) -> None:
        with signals.held():
            connect(*given, **named)

    utils.set_sigterm_handler, worker.connect = lambda handler: None, connect_undisturbed
    try:
        yield
    finally:
        utils.set_sigterm_handler, worker.connect = before, connect


@contextmanager
def _all_ended() -> Iterator[None]:
    """Make sure that the processes of a Ray of our own have ended with it.

    An interrupted start, or a lost head process, leaves agents behind for minutes, and now and then a worker hangs
    forever while it exits (Ray 2.60).
    """
    import psutil

    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = [process for process in psutil.Process().children() if process.name() in ("raylet", "gcs_server")]
    for root in tuple(family):
        with suppress(psutil.Error):
            family += root.children(recursive=True)
    try:
        yield
    finally:
        for process in family:
            with suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + _END_S
        while (alive := [process for process in family if _is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()


def _is_alive(process: Any) -> bool:
    import psutil

    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _where(cluster: ClusterConfig, address: str | None) -> str:
    """Where an address comes from, for messages."""
    return f"cluster.address={address}" if cluster.address is not None or address is None else f"RAY_ADDRESS={address}"


def _unreachable(why: str, *, where: str) -> ClusterError:
    name = where.partition("=")[0]
    return ClusterError(
        f"Ray cannot be reached: {why}",
        where=where,
        repair="start the cluster with `finray cluster up` there, or give the address of a running one; without "
        + ("the variable" if name == "RAY_ADDRESS" else name)
        + " Ray is started on this machine",
    )


def require_alive(address: str, *, where: str) -> None:
    """Check that a cluster answers. Ray itself retries for minutes, and ignores signals meanwhile.

    Args:
        address: as Ray takes it: ``host:port``, or ``auto``, the Ray that was last started on this machine.
        where: where the address comes from.

    Raises:
        ClusterError: nothing listens there, the server is not a Ray head, or the address is one of Ray's client server.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if address.startswith("ray://"):
        host = re.sub(r":\d*$", "", address.removeprefix("ray://")) or "HOST"
        raise ClusterError(
            "this is an address of Ray's client server, and runs need the head itself",
            where=where,
            repair=f"use {host}:6379, with the port that the head was started with, from a machine in the cluster's "
            "network; from elsewhere, use `finray submit`",
        )
    try:
        head = canonicalize_bootstrap_address(address)
    except (OSError, ValueError) as error:
        raise _unreachable(str(error).partition(". ")[0], where=where) from None
    if head is None:
        # `local`: Ray starts one.
        return
    if (refusal := watch.refusal(head, timeout=_CONNECT_S)) is not None:
        raise _unreachable(f"no answer at {head}: {refusal}", where=where)
    import grpc
    from ray.exceptions import AuthenticationError

    from finray.runtime import gcs

    try:
        gcs.check_alive(head, timeout=_ANSWER_S)
    except AuthenticationError:
        raise ClusterError(
            f"there is no token for the cluster at {head} on this machine",
            where=where,
            repair="copy ~/.ray/auth_token from the machine where `finray cluster up` was run, or export "
            "RAY_AUTH_TOKEN with its content",
        ) from None
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise _unreachable(
                f"the server at {head} is not a Ray head ({error.code().name.lower()})",
                where=where,
            ) from None
        if not token.use_token():
            raise token.refused(f"the cluster at {head}", where=where) from None
        require_alive(address, where=where)


@contextmanager
def _without_observers() -> Iterator[None]:
    """Start Ray without processes that nobody needs: the dashboard's server, which a start waits for, the log monitor,
    and the autoscaler's monitor.

    The names are private in Ray 2.60. If another version lacks one, it is not replaced, and starting takes longer.
    """
    from ray._private import node, utils

    def start_nothing(self: Any, **_: Any) -> None:
        self._webui_url = ""

    def missing() -> ImportError:
        # With the dashboard's packages "missing", its agent on each node loads less too.
        return ImportError("not needed")

    replacements: list[tuple[Any, str, Any]] = [(utils, "get_dashboard_dependency_error", missing)]
    replacements += [(node.Node, f"start_{name}", start_nothing) for name in ("monitor", "log_monitor", "api_server")]
    with ExitStack() as stack:
        for place, name, function in replacements:
            if hasattr(place, name):
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, function)
        yield


def orphans(groups: Mapping[str, Mapping[str, Any]], ended_jobs: Collection[str]) -> list[str]:
    """Ids of finray's placement groups whose driver has ended.

    Ray removes the groups of a dead driver once: one that was created a moment later keeps its resources for ever (Ray
    2.60).

    Args:
        groups: Ray's table, by id; the last eight digits of an id are the job's.
        ended_jobs: their ids; each driver is a job.
    """
    return [
        name
        for name, group in groups.items()
        if group["name"].startswith(("finray ", "finray-")) and group["state"] != "REMOVED" and name[-8:] in ended_jobs
    ]


def remove_orphans(ray: Any) -> None:
    """Remove the placement groups of runs and replicas whose driver has ended. Does not wait until Ray has done it."""
    with suppress(Exception):
        from ray.util.placement_group import PlacementGroup

        from finray.runtime import gcs

        ended = gcs.ended_jobs(ray.get_runtime_context().gcs_address)
        for name in orphans(ray.util.placement_group_table(), ended):
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


def start_worker_processes(ray: Any, env: Mapping[str, str], count: int) -> None:
    """Start processes that Ray will use as workers with exactly this environment, for a Ray on this machine only.

    They import what :mod:`finray.runtime.preload` tells them to while the driver continues. Ray reuses a process whose
    environment is the same *text*, as its core writes it. The call is private in Ray 2.60; if it fails, Ray starts the
    processes on demand, and starting takes longer.
    """
    with suppress(Exception):
        from finray.runtime import gcs

        (node,) = (node for node in ray.nodes() if node["Alive"])
        raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        job = ray.get_runtime_context().get_job_id()
        gcs.prestart_workers(raylet, job=job, environment=environment_text(env), count=count)


def environment_text(env: Mapping[str, str]) -> str:
    """A runtime environment of these variables as Ray's core writes it when it merges an actor's with its parent's."""
    return json.dumps({"env_vars": dict(env)}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def dashboard_url(ray: Any) -> str:
    """``host:port`` of the dashboard of a Ray that was started here; the name is private in Ray 2.60."""
    return str(ray._private.worker.get_dashboard_url())


def ask(config: Config) -> list[dict[str, float]]:
    """The resources of each living node of the configured cluster.
    Raises ClusterError: the cluster cannot be reached."""
    require_trusted(config, "cluster.address")
    with connected(config.cluster) as ray:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan(config: Config, *, gpu: str | None = None, offline: bool = False, fresh: bool = False) -> Plan:
    """Plan a run; see :func:`finray.planning.plan.make_plan`."""
    from finray.planning.plan import make_plan

    return make_plan(config, gpu=gpu, offline=offline, fresh=fresh, ask=ask)
