"""Whether a run's workers can be placed on a cluster, and what each of them gets."""

from __future__ import annotations

from dataclasses import dataclass

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError

# For processes that are started directly; see finray.training.allocator for why workers do the rest. The first
# one, huge pages, is the one that arrives.
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"


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
