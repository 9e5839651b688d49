"""`finray cluster up`, `join` and `down`: a node of a Ray cluster on this machine, its token, its ports and its end.

A node is one process, `ray start --block`, with Ray's processes as its children. What was started is recorded in a file
of this machine and user, with the start time of each process, so that no other process is ever ended by mistake.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from finray.errors import ClusterError
from finray.files import replace_text
from finray.runtime import watch
from finray.runtime.cluster import GAVE_UP, require_alive
from finray.runtime.token import require_token

HEAD_PORT, DASHBOARD_PORT = 6379, 8265
# Fixed, so that a firewall can be configured: ports of Ray's processes on each node, and of its workers.
PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "dashboard-agent-grpc-port": 6382,
    "dashboard-agent-listen-port": 6383,
    "runtime-env-agent-port": 6384,
    "metrics-export-port": 6385,
    "min-worker-port": 11000,
    "max-worker-port": 11999,
}
# Authentication by token, no usage reports, and no metrics, which would be served without a token: port -1 does not
# exist.
NODE_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_START_HOOK": "finray.runtime.nodes.without_client_server",
}
# When the head gives up a node that does not answer: after four checks in a row that each wait three seconds, so within
# 16 s. With Ray's own values it took 65 s. A node that is merely busy answers one of the four. These are variables
# because Ray lets a user's `--system-config` win over them.
HEALTH_ENV = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
# Versions that nodes must share. A torch build for other hardware (2.13.0+cu128) is not another version.
COMPARED = ("python", "ray", "torch", "transformers", "finray")
_LABEL, _NODE = "finray/", "finray/node"
_START_S, _END_S, _LOOK_S = 120.0, 20.0, 0.5


# --- versions --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """The installed versions; nothing is imported."""
    installed = {"python": platform.python_version()}
    for name in COMPARED[1:]:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "none"
    return installed


def differences(here: Mapping[str, str], head: Mapping[str, str]) -> list[str]:
    """Packages whose version differs from the head's: ``torch 2.11.0 (the head has 2.13.0)``."""

    def release(name: str, version: str) -> str:
        return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]

    pairs = [(name, here.get(name, "none"), head[name]) for name in COMPARED if name in head]
    return [
        f"{name} {mine} (the head has {its})" for name, mine, its in pairs if release(name, mine) != release(name, its)
    ]


def labels_of(installed: Mapping[str, str]) -> str:
    """Versions as labels of a Ray node, which cannot contain `+`."""
    return ",".join(f"{_LABEL}{name}={version.replace('+', '__')}" for name, version in installed.items())


def versions_in(labels: Mapping[str, str]) -> dict[str, str]:
    """The versions that :func:`labels_of` wrote; empty for a node that finray did not start."""
    ours = {name.removeprefix(_LABEL): value for name, value in labels.items() if name.startswith(_LABEL)}
    return {name: ours[name].replace("__", "+") for name in COMPARED if name in ours}


# --- what runs here --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """Processes that `up` or `join` started on this machine.

    Attributes:
        address: of the cluster's head.
        ip: of this machine in the cluster.
        is_head: started by `up`.
        processes: each with its start time; the first is `ray start`.
        log: Ray's output.
    """

    address: str
    ip: str
    is_head: bool
    processes: list[tuple[int, float]]
    log: str


def state_dir() -> Path:
    """Directory of this machine's record of what this user started. (A home directory may be shared by many
    machines.)
    Raises ClusterError: other users have access to it."""
    folder = Path(tempfile.gettempdir()) / f"finray-cluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ClusterError("other users have access to this directory", where=str(folder), repair="delete it")
    return folder


def running() -> Running | None:
    """What `up` or `join` started here and still runs; None if there is nothing."""
    try:
        plain = json.loads((state_dir() / "node.json").read_text(encoding="utf-8"))
        node = Running(**{**plain, "processes": [(int(pid), float(at)) for pid, at in plain["processes"]]})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return node if _alive(node.processes) else None


def _alive(processes: Sequence[tuple[int, float]]) -> list[Any]:
    """Those that still run; a process that reused the id of an ended one has another start time."""
    import psutil

    alive = []
    for pid, started in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _family(processes: Sequence[Any]) -> list[Any]:
    """Processes and all their descendants, each once."""
    import psutil

    family = {process.pid: process for process in processes}
    for process in processes:
        with suppress(psutil.Error):
            family |= {child.pid: child for child in process.children(recursive=True)}
    return list(family.values())


# --- up, join, down --------------------------------------------------------------------------------------------------


def up(
    *, host: str | None = None, dashboard_host: str = "127.0.0.1", options: Sequence[str] = ()
) -> tuple[Running, bool]:
    """Start a cluster with this machine as its head; also returns whether a token was created for it.

    Args:
        host: address at which the other machines reach this one; None means that of the default route.
        dashboard_host: where Ray's dashboard listens.
        options: more options of `ray start`; its labels are added to finray's.

    Nodes that do not answer are given up after :data:`HEALTH_ENV`, unless the user set these variables.

    Raises:
        ClusterError: a node runs here already, an option is not possible, or Ray does not start.
    """
    where = "finray cluster up"
    _require_none(where)
    # Port 0 would be one that Ray chooses.
    _require_usable(options, ("--address", "--node-ip-address", "--port=0"), where=where)
    made = require_token(where=where, create=True)
    os.environ["RAY_AUTH_MODE"] = "token"
    ip = host or _own_address(None)
    ports, _ = _taken(options, "--port")
    address = joined(ip, int(ports[-1]) if ports and ports[-1].isdecimal() else HEAD_PORT)
    if watch.refusal(address) is None:
        raise ClusterError(
            f"{address} is already in use",
            where=where,
            repair="stop the cluster there with `finray cluster down`, or with the tool that started it",
        )
    head = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=true", f"--dashboard-host={dashboard_host}"]
    return _start(address, ip, [*head, "--no-monitor"], options, where=where, is_head=True), made


def join(
    address: str, *, host: str | None = None, any_version: bool = False, options: Sequence[str] = ()
) -> tuple[Running, list[str]]:
    """Make this machine a node of a cluster; also returns its versions that differ from the head's.

    Args:
        address: of the head, as `up` printed it; the port may be left out.
        host: address at which the other machines reach this one; None means that of the route to the head.
        any_version: join even if versions differ from the head's.
        options: more options of `ray start`; its labels are added to finray's.

    Raises:
        ClusterError: a node runs here already, an option is not possible, the head does not answer or has other
            versions, or Ray does not start.
    """
    address = with_port(address)
    where = f"finray cluster join {address}"
    _require_none(where)
    _require_usable(options, ("--address", "--node-ip-address", "--port"), where=where)
    require_token(where=where, create=False)
    head = [node for node in gcs_nodes(address, where=where) if node["is_head"] and node["alive"]]
    required = versions_in(head[0]["labels"]) if head else {}
    other = differences(versions(), required)
    if other and not any_version:
        raise ClusterError(
            "this machine has different versions from the head of the cluster",
            where=where,
            repair="install the head's versions here: "
            + " ".join(f"{name}=={version.partition('+')[0]}" for name, version in required.items() if name != "python")
            + f", in Python {required['python']}; or use --any-version if you know that they work together",
            problems=tuple(other),
        )
    return _start(address, host or _own_address(address), [f"--address={address}"], options, where=where), other


def dashboard_port(options: Sequence[str]) -> int:
    """The port of the dashboard with these options of `ray start`; the last one wins."""
    ports, _ = _taken(options, "--dashboard-port")
    return int(ports[-1]) if ports and ports[-1].isdecimal() else DASHBOARD_PORT


def _taken(options: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The values that one of these options of `ray start` has, and the other words."""
    values, others = [], []
    words = iter(options)
    for word in words:
        key, has_value, value = word.partition("=")
        if key == name:
            values.append(value if has_value else next(words, ""))
        else:
            others.append(word)
    return values, others


def _require_usable(options: Sequence[str], refused: Sequence[str], *, where: str) -> None:
    """Check that finray will find a node with these options.

    Args:
        options: of `ray start`.
        refused: names of options, or an option with a value.
        where: the command.
    """
    for option in refused:
        name, _, value = option.partition("=")
        values, _ = _taken(options, name)
        if values and value in ("", *values):
            raise ClusterError(
                f"{option} is not possible after --",
                where=where,
                repair="--host takes the address of this machine, `finray cluster join ADDRESS` that of the head, and "
                "`finray cluster up -- --port=NUMBER` the head's port",
            )


def without_client_server(parameters: Any, head: bool) -> None:  # noqa: ARG001
    """Replaces a function that `ray start` calls first: finray needs no Ray client, and there is no option to omit
    it."""
    parameters.ray_client_server_port = None


def down(*, within_s: float = 0.0, notify: Callable[[str], None] = lambda text: None) -> int:
    """End what `up` or `join` started here, and nothing else; returns the number of processes.

    Args:
        within_s: seconds that this machine remains: runs that use it are told, save a checkpoint, and have this time.
        notify: called with progress messages.
    """
    import psutil

    node = running()
    if node is None:
        (state_dir() / "node.json").unlink(missing_ok=True)
        return 0
    before = len(_family(_alive(node.processes)))
    if within_s and node.is_head:
        raise ClusterError(
            "this machine is the head, and all runs of its cluster end with it",
            where="--within",
            repair="end the runs first, which saves a checkpoint (Ctrl-C, or SIGTERM to `finray train`)",
        )
    if within_s:
        deadline = time.monotonic() + within_s
        try:
            announce_end(node.address, node.ip, within_s, where="--within")
            notify(f"the runs that use this machine have {within_s:g} s to save a checkpoint")
        except ClusterError as error:
            # The machine goes all the same.
            notify(f"the runs were not told that this machine goes: {error.message}")
            deadline = 0.0
        while time.monotonic() < deadline and any(map(_trains, _family(_alive(node.processes)))):
            psutil.wait_procs(_alive(node.processes), timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic())))
    count = max(before, _end(_alive(node.processes)))
    # Another `down` may have been here meanwhile.
    (state_dir() / "node.json").unlink(missing_ok=True)
    return count


def _trains(process: Any) -> bool:
    """Whether a process of Ray's is a worker of a training."""
    import psutil

    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _end(processes: Sequence[Any]) -> int:
    """End processes with all their descendants: by SIGTERM, after a while by SIGKILL."""
    import psutil

    family = _family(processes)
    for process in processes[:1]:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(family, timeout=_END_S)
    # Also those started since.
    for process in _family(left):
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=_END_S)
    return len(family)


def _start(
    address: str, ip: str, role: Sequence[str], options: Sequence[str], *, where: str, is_head: bool = False
) -> Running:
    """Run `ray start` until the head knows the node; once more if the machine was too slow for Ray."""
    import psutil

    folder = state_dir()
    log = folder / "ray.log"
    words = [*role, f"--node-ip-address={ip}", *(f"--{name}={port}" for name, port in PORTS.items())]

    def keep(processes: Sequence[Any]) -> Running:
        kept = []
        for process in processes:
            with suppress(psutil.Error):
                kept.append((process.pid, process.create_time()))
        node = Running(address, ip, is_head, kept, str(log))
        replace_text(folder / "node.json", json.dumps(asdict(node)))
        return node

    try:
        me = _run_node(address, [*words, *options], log, keep, where=where)
    except ClusterError:
        if GAVE_UP not in log.read_text(encoding="utf-8", errors="replace"):
            raise
        # The second start is faster: the files that it reads are in memory.
        me = _run_node(address, [*words, *options], log, keep, where=where)
    return keep([me, *(process for process in _family([me]) if process.pid != me.pid)])


def _run_node(
    address: str, words: Sequence[str], log: Path, keep: Callable[[Sequence[Any]], Running], *, where: str
) -> Any:
    """Start a node's process, and wait until the head knows the node.

    It is kept at once, so that :func:`down` ends it also if this process is killed while it waits.
    """
    import psutil

    mark = secrets.token_hex(8)
    # Ray takes the last --labels, and of a label the last value.
    more, words = _taken(words, "--labels")
    labels = f"--labels={','.join([*filter(None, more), labels_of(versions())])},{_NODE}={mark}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", labels, *words, "--block"],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment(),
            # Ctrl-C in the terminal must not reach it.
            start_new_session=True,
        )
    me = psutil.Process(process.pid)
    try:
        keep([me])
        deadline = time.monotonic() + _START_S
        while not _is_known(address, mark):
            if process.poll() is not None or time.monotonic() > deadline:
                why = "Ray did not start" if process.poll() is not None else f"Ray did not start in {_START_S:g} s"
                lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
                last = next((line for line in reversed(lines) if line), "it said nothing")
                raise ClusterError(f"{why}: {last}", where=where, repair=f"see {log}")
            time.sleep(0.2)
    except BaseException:
        _end([me])
        process.wait()
        (log.parent / "node.json").unlink(missing_ok=True)
        raise
    return me


def environment() -> dict[str, str]:
    """The variables of a node's processes."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # The `python` of a submitted job is the one that runs this command, also if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [inherited.get("PATH")])])
    return HEALTH_ENV | inherited | NODE_ENV | {"PATH": path}


def _is_known(address: str, mark: str) -> bool:
    """Whether the head knows the node that has this mark."""
    with suppress(ClusterError):
        return any(node["alive"] and node["labels"].get(_NODE) == mark for node in gcs_nodes(address, where=""))
    return False


def _require_none(where: str) -> None:
    if (node := running()) is not None:
        what = "the head of a cluster" if node.is_head else f"a node of the cluster at {node.address}"
        raise ClusterError(f"this machine is already {what}", where=where, repair="stop it first: finray cluster down")


def gcs_nodes(address: str, *, where: str) -> list[dict[str, Any]]:
    """The nodes that a head knows, queried without joining: who, since when, whether alive and whether the head.
    Raises ClusterError: the head does not answer, or requires another token."""
    # Send this user's token if there is one.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        require_alive(address, where=where)
    except ClusterError as error:
        repair = (
            "copy the file ~/.ray/auth_token of the head's machine to this one (mode 600), or set RAY_AUTH_TOKEN"
            if "token" in error.message
            else f"run `finray cluster up` on that machine; between the two, ports {HEAD_PORT}-{HEAD_PORT + 6} and "
            f"{PORTS['min-worker-port']}-{PORTS['max-worker-port']} must be open"
        )
        raise ClusterError(error.message, where=where, repair=repair) from None
    from finray.runtime import gcs

    with gcs.answering(where=where):
        return gcs.nodes(address)


def announce_end(address: str, ip: str, within_s: float, *, where: str) -> None:
    """Tell a head that a node will be gone, as a cloud does: runs save a checkpoint, and nothing new starts there.
    Raises ClusterError: the head does not answer, or does not know the node."""
    here = [node for node in gcs_nodes(address, where=where) if node["ip"] == ip and node["alive"]]
    if not here:
        raise ClusterError(f"the head knows no node {ip}", where=where)
    from finray.runtime import gcs

    # One that died a moment ago may still be listed.
    node = max(here, key=lambda node: int(node["started"]))["id"]
    with gcs.answering(where=where):
        refusal = gcs.drain(address, node, within_s, message="finray cluster down")
    if refusal:
        raise ClusterError(f"the head refuses: {refusal}", where=where)


def _own_address(other: str | None) -> str:
    """The address of this machine on the route to another one, or on the default route."""
    import ray.util

    address: str = ray.util.get_node_ip_address(*([] if other is None else [other]))
    return address


def no_cluster() -> ClusterError:
    """The error when no cluster is named, and none was started or joined on this machine."""
    return ClusterError(
        "no cluster was started or joined on this machine",
        where="finray cluster",
        repair="finray cluster up, finray cluster join ADDRESS, or give an address",
    )


def with_port(address: str) -> str:
    """A head's address with its port, and without a scheme; ``auto`` stands for the Ray of this machine."""
    if address == "auto":
        return address
    plain = address.removeprefix("ray://")
    has_port = plain.rpartition("]")[2].count(":") == 1
    return plain if has_port else joined(plain.strip("[]"), HEAD_PORT)


def joined(host: str, port: int) -> str:
    """``host:port``, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
