"""Whether a run's workers can be placed on a cluster, and what each of them gets: CPUs, a GPU, memory. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from finray.config.environment import spin_limit, with_defaults
from finray.config.schema import ClusterConfig
from finray.errors import ClusterError, ConfigError
from finray.hardware import cpu_has_bf16, machine_cpus, machine_memory

# What Ray's own processes and the driver take on a machine that also trains.
RESERVED = 2**30

Node = Mapping[str, float]

# For processes that are started directly; see finray.training.allocator for why workers do the rest. The first
# one, huge pages, is the one that arrives.
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
# Shapes of bf16 products whose code oneDNN keeps on a CPU. Its own 1024 fill 600 MiB, between tensors in the heap, and
# still do not hold those of all lengths in a run. One micro-batch needs some 30, and 6 for each length of its rows.
KERNEL_CACHE = 256


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of each worker, and of the evaluator, if there is one.

    Attributes:
        num_workers: number of workers for which there is room now.
        cpus_per_worker: CPUs of each.
        use_gpu: whether each has a GPU, or a share of one.
        evaluator: whether there is an evaluator.
        fewest, most: bounds of an elastic number of workers; else None.
        gpus_per_worker: GPUs of each, possibly a fraction.
    """

    num_workers: int
    cpus_per_worker: int
    use_gpu: bool
    evaluator: bool = False
    fewest: int | None = None
    most: int | None = None
    gpus_per_worker: float = 1.0

    @property
    def resources(self) -> dict[str, float]:
        """Resources of a worker, as Ray's names and amounts."""
        return {"CPU": float(self.cpus_per_worker), **({"GPU": self.gpus_per_worker} if self.use_gpu else {})}

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of training workers."""
        return self.fewest or self.num_workers, self.most or self.num_workers


def place(cluster: ClusterConfig, nodes: Sequence[Node], *, evaluator: bool = False) -> Placement:
    """Place workers on a cluster.

    A worker runs on one node, so the CPUs of two nodes cannot be added up for it, nor the GPU of one and the CPUs of
    another.

    Args:
        cluster: what the run asks for.
        nodes: resources of each node; a worker lies on one of them.
        evaluator: whether checkpoints are evaluated during training, on what one worker more would have.

    Raises:
        ClusterError: the workers do not fit.
    """
    wanted, path = cluster.min_workers, f"cluster.num_workers{'.min' if cluster.is_elastic else ''}"
    together, who = wanted + evaluator, f"{wanted} workers"
    if evaluator:
        who = f"{wanted} worker{'s' if wanted > 1 else ''} and an evaluator"
    share = cluster.gpus_per_worker
    gpus = sum(_times(int(node.get("GPU", 0)), share) for node in nodes)
    use_gpu = gpus >= wanted if cluster.use_gpu == "auto" else cluster.use_gpu
    a_gpu, has = ("a GPU", f"{gpus}") if share == 1 else (f"{share:g} of a GPU", f"room for {gpus} such shares")
    if use_gpu and gpus < wanted:
        raise ClusterError(
            f"{wanted} workers need {a_gpu} each, but the cluster has {has}",
            where=path,
            repair=f"set {path} to {gpus} or less, or cluster.use_gpu to false"
            if gpus
            else "set cluster.use_gpu to false",
        )
    if use_gpu and gpus < together:
        raise ClusterError(
            f"{who} need {a_gpu} each, but the cluster has {has}",
            where="evaluation.mode=async",
            repair="set evaluation.mode to inline"
            + (f", or {path} to {gpus - 1}" if gpus > 1 else ", or use a cluster with one more GPU"),
        )
    cpus = [int(node.get("CPU", 0)) for node in nodes if not use_gpu or node.get("GPU")]
    a_share, most = {"GPU": share} if use_gpu else {}, cluster.max_workers + evaluator
    if cluster.cpus_per_worker is not None:
        each = cluster.cpus_per_worker
    else:
        # As many workers as there is room for come before CPUs for each.
        shared = max(together, room(nodes, {"CPU": 1, **a_share}, most=most))
        sizes = range(max(cpus, default=1), 1, -1)
        each = next((size for size in sizes if room(nodes, {"CPU": size, **a_share}, most=shared) >= shared), 1)
    if (fitting := room(nodes, {"CPU": each, **a_share}, most=most)) < together:
        fewer, of = fitting - evaluator, f"of {each} CPU{'s' if each > 1 else ''}"
        repair = f"set {path} to {fewer} or less" if fewer > 0 else "set cluster.cpus_per_worker lower"
        if use_gpu and fewer > 0 and each > 1:
            repair += ", or cluster.cpus_per_worker lower"
        there = f"the cluster has {sum(cpus)}, enough for {fitting}"
        if use_gpu:
            there = f"the machines with a GPU have {sum(cpus)} CPUs, and room for {fitting} such workers"
        if evaluator:
            repair = "set evaluation.mode to inline" + (f", or {repair[4:]}" if each > 1 or fewer > 0 else "")
        raise ClusterError(
            f"{who} {of} {'each ' if evaluator else ''}do not fit: {there}",
            where="evaluation.mode=async" if evaluator and fitting >= wanted else path,
            repair=repair,
        )
    if not cluster.is_elastic:
        return Placement(wanted, each, use_gpu, evaluator, gpus_per_worker=share)
    return Placement(fitting - evaluator, each, use_gpu, evaluator, wanted, cluster.max_workers, share)


def elsewhere(cluster: ClusterConfig) -> Placement:
    """A placement on unknown machines, with a GPU for each worker."""
    cpus, share = cluster.cpus_per_worker or 1, cluster.gpus_per_worker
    if not cluster.is_elastic:
        return Placement(cluster.min_workers, cpus, use_gpu=True, gpus_per_worker=share)
    most = cluster.max_workers
    return Placement(most, cpus, use_gpu=True, fewest=cluster.min_workers, most=most, gpus_per_worker=share)


def room(free: Iterable[Mapping[str, float]], each: Mapping[str, float], *, most: int) -> int:
    """Number of workers, each on one node, for which the available resources of nodes suffice, at most ``most``."""
    wanted = {name: amount for name, amount in each.items() if amount > 0}
    return min(most, sum(min(_times(node.get(name, 0), amount) for name, amount in wanted.items()) for node in free))


def share(nodes: Sequence[Node], replicas: int, *, free: Sequence[Node], one_gpu: bool, where: str) -> dict[str, int]:
    """What each of so many replicas of a model gets, on one node: as many GPUs and then CPUs as all of them can have.

    Args:
        nodes: resources of each node.
        replicas: how many.
        free: what is left of them, to be shared where all find a place in it; else they wait for others.
        one_gpu: whether a replica cannot use several.
        where: the number comes from.

    Raises:
        ClusterError: the nodes never have room for so many.
    """
    cpus, gpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("CPU", "GPU"))
    each = {"CPU": 1} | ({"GPU": 1} if any(gpus) else {})
    if (fits := room(nodes, each, most=replicas)) < replicas:
        raise ClusterError(
            f"{replicas} replicas need a CPU {'and a GPU ' if any(gpus) else ''}each, and the cluster has {sum(cpus)} "
            f"CPUs {f'and {sum(gpus)} GPUs ' if any(gpus) else ''}on {len(nodes)} machine{'s' * (len(nodes) > 1)}",
            where=where,
            repair=f"ask for {fits} or fewer" if fits else "join a cluster with room",
        )
    shared = free if room(free, each, most=replicas) == replicas else nodes
    for kind, most in (("GPU", 1 if one_gpu else max(gpus)), ("CPU", max(cpus))):
        while kind in each and each[kind] < most:
            more = {**each, kind: each[kind] + 1}
            if room(shared, more, most=replicas) < replicas:
                break
            each = more
    return each


def _times(amount: float, share: float) -> int:
    """How often a share fits: of a GPU it lies on one of them. Ray counts in ten-thousandths."""
    if share < 1:
        return int(amount) * (10_000 // round(share * 10_000)) + round(amount % 1 * 10_000) // round(share * 10_000)
    return round(amount * 10_000) // round(share * 10_000)


def worker_environment(
    cluster: ClusterConfig, *, threads: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment variables of the workers: the user's own, and allocator and thread defaults if they are not set."""
    return with_defaults(
        cluster.env,
        {
            ("GLIBC_TUNABLES",): ALLOCATOR,
            ("OMP_NUM_THREADS",): str(threads),
            **{(name,): value for name, value in spin_limit({**environ, **cluster.env}).items()},
            ("TOKENIZERS_PARALLELISM",): "false",
            # The second is its older name.
            ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"): str(KERNEL_CACHE),
            # torch prefers the second, older name.
            ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        },
        environ,
    )


# --- what a worker runs on ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    name: str  # as it is given to `--gpu`
    memory: int  # bytes that its driver reports
    bf16: bool = True  # whether it multiplies bf16 in hardware
    tflops: float | None = None  # dense products of 16-bit matrices by its data sheet, in 10^12 operations a second


# MiB as nvidia-smi shows them (with error correction on, where it is by default); of MI300X and B300 the gigabytes of
# the data sheet.
GPUS: dict[str, Gpu] = {
    name: Gpu(name, mib * 2**20, bf16, tflops)
    for name, mib, bf16, tflops in (
        ("t4-16gb", 15_360, False, 65),
        ("v100-16gb", 16_160, False, 125),
        ("v100-32gb", 32_510, False, 125),
        ("rtx3090-24gb", 24_576, True, 71),
        ("rtx4090-24gb", 24_564, True, 165),
        ("rtx5090-32gb", 32_607, True, 209),
        ("l4-24gb", 23_034, True, 121),
        ("a10g-24gb", 23_028, True, 70),
        ("a100-40gb", 40_960, True, 312),
        ("l40s-48gb", 46_068, True, 362),
        ("a6000-48gb", 49_140, True, 155),
        ("rtx6000ada-48gb", 49_140, True, 364),
        ("a100-80gb", 81_920, True, 312),
        ("h100-80gb", 81_559, True, 989),
        ("gh200-96gb", 97_871, True, 989),
        ("h200-141gb", 143_771, True, 989),
        ("b200-180gb", 183_359, True, 2250),
        ("mi300x-192gb", 183_105, True, 1307),
        ("b300-288gb", 274_658, True, 2250),
    )
}

# Ray's names of accelerators. Where one name covers several sizes, the smallest is taken.
_ACCELERATORS = {
    "T4": "t4-16gb",
    "V100": "v100-16gb",
    "L4": "l4-24gb",
    "A10G": "a10g-24gb",
    "A100": "a100-40gb",
    "A100-40G": "a100-40gb",
    "A100-80G": "a100-80gb",
    "L40S": "l40s-48gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "B300": "b300-288gb",
    "AMD-Instinct-MI300X-OAM": "mi300x-192gb",
}
_ACCELERATOR_KEY = "accelerator_type:"


def gpu_named(name: str) -> Gpu:
    """A GPU of the table; its name without the memory is enough where it comes with one size.
    Raises ConfigError: no GPU has this name, or several have; the message lists the known ones."""
    lower = name.lower()
    sizes = [gpu for full_name, gpu in GPUS.items() if lower in (full_name, full_name.rpartition("-")[0])]
    if len(sizes) != 1:
        message = f"`{name}` comes with several sizes of memory" if sizes else f"no GPU is called `{name}`"
        names = [gpu.name for gpu in sizes] or list(GPUS)
        raise ConfigError(message, where="--gpu", repair=f"use one of: {', '.join(names)}")
    return sizes[0]


def gpu_of(nodes: Sequence[Node]) -> Gpu | None:
    """The smallest GPU among the resources of a Ray cluster; None if it names no known GPU."""
    kinds = {
        key.removeprefix(_ACCELERATOR_KEY)
        for node in nodes
        if node.get("GPU")
        for key in node
        if key.startswith(_ACCELERATOR_KEY)
    }
    gpus = [GPUS[_ACCELERATORS[kind]] for kind in kinds if kind in _ACCELERATORS]
    return min(gpus, key=lambda gpu: gpu.memory) if gpus and len(gpus) == len(kinds) else None


def local_gpus() -> list[Gpu]:
    """The GPUs of this machine, as torch sees them."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    # Ampere (8.0) is the first with bf16 in hardware; on older ones torch emulates it.
    return [Gpu(one.name, int(one.total_memory), one.major >= 8, _tflops_of(one.name)) for one in devices]


def _tflops_of(name: str) -> float | None:
    """The rate of a GPU by the name that its driver gives it, such as `NVIDIA A100-SXM4-80GB`."""
    plain = re.sub("[^a-z0-9]", "", name.lower())
    found = [full for full in GPUS if full.partition("-")[0] in plain]
    # The longest: an L40S has "l4" in its name, too.
    return GPUS[max(found, key=len)].tflops if found else None


@dataclass(frozen=True, slots=True)
class Device:
    """What one worker runs on."""

    kind: Literal["cpu", "cuda"]
    name: str  # of the GPU, or of the machine
    memory: int | None  # bytes that the worker may have, where that is known
    bf16: bool = True  # whether it multiplies bf16 in hardware; emulated bf16 does not count
    tflops: float | None = None  # as of `Gpu`


def this_machine(gpus: Sequence[Gpu]) -> Node:
    """This machine as a node of a cluster."""
    return {"CPU": machine_cpus(), "GPU": len(gpus), "memory": machine_memory() - RESERVED}


def device_of(placement: Placement, nodes: Sequence[Node] | None = None) -> Device:
    """What a worker of a placement runs on; ``nodes`` is None where Ray runs on this machine alone, for the run."""
    gpus = local_gpus() if nodes is None and placement.use_gpu else []
    nodes = [this_machine(gpus)] if nodes is None else nodes
    if placement.use_gpu:
        gpu = min(gpus, key=lambda device: device.memory) if gpus else gpu_of(nodes)
        if gpu is None:
            return Device("cuda", "the cluster's GPU", None)
        return Device("cuda", gpu.name, int(gpu.memory * placement.gpus_per_worker), gpu.bf16, gpu.tflops)
    shares = []
    for node in nodes:
        workers = min(int(node.get("CPU", 0)) // placement.cpus_per_worker, placement.num_workers)
        if workers and "memory" in node:
            shares.append(int(node["memory"]) // workers)
    # The CPUs of other nodes are taken to be like this machine's.
    name = "the machine" if len(nodes) == 1 else "a node"
    return Device("cpu", name, min(shares, default=None), cpu_has_bf16())


def slow_precision(precision: str, device: Device) -> ConfigError | None:
    """The warning where a device has no arithmetic in a precision (``fp32``, ``bf16``, ``fp16``), and emulates it."""
    where, repair = "train.precision", "set train.precision to auto"
    if precision == "fp16" and device.kind == "cpu":
        return ConfigError("a CPU works many times slower in fp16 than in bf16 or fp32", where=where, repair=repair)
    if precision != "bf16" or device.bf16:
        return None
    who, faster, times = f"the CPU of {device.name}", "fp32 is", "up to 100 times"
    if device.kind == "cuda":
        who, faster, times, repair = device.name, "fp32 and fp16 are", "several times", f"{repair} or fp16"
    text = f"{who} has no bf16 instructions: {faster} {times} faster than their emulation"
    return ConfigError(text, where=where, repair=repair)


def crowded(load: float, *, cores: int, threads: int) -> ConfigError | None:
    """The warning where a worker's threads on a CPU would wait for each other most of the time, because other programs
    have the cores.

    Args:
        load: programs that run or wait for a core of the machine on average, before the worker starts.
        cores: of the machine.
        threads: of the worker.
    """
    if threads < 2 or load + threads < 2 * cores:
        return None
    share = max(1, int(cores * threads / (load + threads)))
    return ConfigError(
        f"other programs keep this machine busy: its load is {load:.1f} on {cores} core{'s' * (cores > 1)}, where "
        f"{threads} threads wait for each other, and may get less done than {'one' if share == 1 else share}",
        where="cluster.cpus_per_worker",
        repair=f"set cluster.cpus_per_worker to {share}, or wait until the others are done",
    )
