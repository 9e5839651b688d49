"""Connecting to Ray, and whether a run's workers can be placed."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finray.config.schema import ClusterConfig, Config
from finray.errors import ClusterError

if TYPE_CHECKING:
    from finray.planning.plan import Plan

OBJECT_STORE_BYTES = 256 * 2**20

# A Ray of our own on this machine: a token is asked for, nothing is reported to anybody, what only a dashboard would
# read is not collected, and nobody watches for a machine that is taken away. Workers are not made to yield to Ray's own
# processes: a step of several threads waits for the one that was interrupted.
LOCAL_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_event_stats": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


def address_of(cluster: ClusterConfig) -> str | None:
    """The address of the cluster that a config or the environment names; None for a Ray of our own."""
    return cluster.address or os.environ.get("RAY_ADDRESS")


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[Any]:
    """Ray, connected to the configured cluster or started on this machine; left as it was found.

    A Ray that finray starts asks for a token and has no dashboard.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    address = address_of(cluster)
    # Ray forks to start its processes. Unless told, tokenizers would warn at each and leave threads off from then on.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Ray Train asks workers for news every two seconds by default, and a report waits for that.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    # Ray 2.60 warns about a change of defaults that does not concern us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        for name, value in LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        if os.environ["RAY_AUTH_MODE"] == "token":
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": bool(os.environ.get("FINRAY_VERBOSE"))}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray cannot be reached: {str(error).splitlines()[0]}",
            where=f"cluster.address={address}",
            repair="start it with `ray start --head`, or leave cluster.address out to use this machine",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def ask(config: Config) -> list[dict[str, float]]:
    """The resources of each living node of the configured cluster.

    Raises:
        ClusterError: it cannot be reached.
    """
    with connected(config.cluster) as ray:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan(config: Config, *, gpu: str | None = None, offline: bool = False) -> Plan:
    """Look at everything that a run needs; see :func:`finray.planning.plan.make_plan`."""
    from finray.planning.plan import make_plan

    return make_plan(config, gpu=gpu, offline=offline, ask=ask)
