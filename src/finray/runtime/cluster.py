"""Connecting to Ray, and whether a run's workers can be placed."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError

OBJECT_STORE_BYTES = 256 * 2**20
# For processes that are started directly; see finray.training.memory for why workers do the rest themselves. The first
# one, huge pages, is the one that arrives.
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"

# A Ray of our own on this machine: a token is asked for, nothing is reported to anybody, and what only a dashboard
# would read is not collected. Workers are not made to yield to Ray's own processes: a step of several threads waits for
# the one that was interrupted.
LOCAL_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_event_stats": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """What each worker gets."""

    num_workers: int
    cpus_per_worker: int
    use_gpu: bool

    @property
    def resources(self) -> dict[str, float]:
        """As Ray wants it."""
        return {"CPU": float(self.cpus_per_worker), **({"GPU": 1.0} if self.use_gpu else {})}


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[Any]:
    """Ray, connected to the configured cluster or started on this machine; left as it was found.

    A Ray that finray starts asks for a token and has no dashboard.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    address = cluster.address or os.environ.get("RAY_ADDRESS")
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


def place(cluster: ClusterConfig, nodes: list[dict[str, float]]) -> Placement:
    """How workers are placed on a cluster.

    Args:
        cluster: what the run asks for.
        nodes: resources of each node; a worker lies on one of them.

    Raises:
        ClusterError: the workers do not fit.
    """
    wanted = cluster.num_workers
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    use_gpu = gpus >= wanted if cluster.use_gpu == "auto" else cluster.use_gpu
    if use_gpu and gpus < wanted:
        raise ClusterError(
            f"{wanted} workers want a GPU each, the cluster has {gpus}",
            where="cluster.num_workers",
            repair=f"set cluster.num_workers to {gpus} or less, or cluster.use_gpu to false"
            if gpus
            else "set cluster.use_gpu to false",
        )
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    if cluster.cpus_per_worker is not None:
        each = cluster.cpus_per_worker
    else:
        each = next((size for size in range(max(cpus, default=1), 1, -1) if _fit(cpus, size) >= wanted), 1)
    if _fit(cpus, each) < wanted:
        fitting = _fit(cpus, each)
        raise ClusterError(
            f"{wanted} workers of {each} CPU{'s' if each > 1 else ''} do not fit: the cluster has {sum(cpus)}, "
            f"which is room for {fitting}",
            where="cluster.num_workers",
            repair=f"set cluster.num_workers to {fitting} or less" if fitting else "set cluster.cpus_per_worker lower",
        )
    return Placement(wanted, each, use_gpu)


def _fit(cpus: list[int], each: int) -> int:
    """How many workers of ``each`` CPUs the nodes have room for."""
    return sum(count // each for count in cpus)


def worker_environment(cluster: ClusterConfig, *, threads: int) -> dict[str, str]:
    """Environment variables of the workers: allocator, threads, then the user's own."""
    return {
        "GLIBC_TUNABLES": ALLOCATOR,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        **cluster.env,
    }
