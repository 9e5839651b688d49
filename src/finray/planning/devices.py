"""What workers run on: memory of GPUs by name, and of this machine within the limits of its control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from finray.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as it is given to ``--gpu``.
        memory: bytes that its driver reports.
        bf16: whether it multiplies bf16 in hardware.
        tflops: dense products of 16-bit matrices by its data sheet, in 10^12 operations a second; None where that is
            not known.
    """

    name: str
    memory: int
    bf16: bool = True
    tflops: float | None = None


# MiB as nvidia-smi shows them (with error correction on, where it is by default).
GPUS: dict[str, Gpu] = {
    name: Gpu(name, mib * MIB, bf16, tflops)
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
        ("a100-80gb", 81_920, True, 312),
        ("h100-80gb", 81_559, True, 989),
        ("h200-141gb", 143_771, True, 989),
        ("b200-180gb", 183_359, True, 2250),
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
}
_ACCELERATOR_KEY = "accelerator_type:"


def gpu_named(name: str) -> Gpu:
    """A GPU of the table.

    Raises:
        ConfigError: there is none of that name; the message lists those there are.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"no GPU is called `{name}`", where="--gpu", repair=f"use one of: {', '.join(GPUS)}")
    return gpu


def gpu_of(nodes: list[dict[str, float]]) -> Gpu | None:
    """The smallest GPU that a Ray cluster names among its resources; None where it names none that is known."""
    kinds = {
        key.removeprefix(_ACCELERATOR_KEY)
        for node in nodes
        if node.get("GPU")
        for key in node
        if key.startswith(_ACCELERATOR_KEY)
    }
    known = [GPUS[_ACCELERATORS[kind]] for kind in kinds if kind in _ACCELERATORS]
    return min(known, key=lambda gpu: gpu.memory) if known and len(known) == len(kinds) else None


def local_gpus() -> list[Gpu]:
    """The GPUs of this machine, as torch sees them."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(one.name, int(one.total_memory), one.major >= 8) for one in found]


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that processes here may have: the machine's, or less where a control group limits it.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    total = int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    return min([total, *_group_limits(root)])


def _group_limits(root: Path) -> list[int]:
    """Limits of this process's control group and of those around it, of version 2 and of version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # A container may see its own group as the root.
        found += [_limit(place / file) for place in (folder, *folder.parents) if place.is_relative_to(base)]
    return [limit for limit in found if limit is not None]


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def machine_cpus() -> int:
    """CPUs that processes here may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
