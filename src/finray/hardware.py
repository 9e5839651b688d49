"""This machine's memory and CPUs, and what they compute bf16 with. Imports no torch."""

from __future__ import annotations

import os
import platform
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Literal

# What the kernels in `models/cpu_kernels.c` need of a CPU, as Linux names it and as compilers do.
KERNEL_FEATURES = {
    name: name.replace("_", "") for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
}


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16, AMX, Arm's BF16); elsewhere fp32 is faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine() == "arm64"
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def c_compiler() -> list[str]:
    """The command of the C compiler: that in ``CC``, which may have options, or ``cc``. Empty if there is none."""
    words = (os.environ.get("CC") or "cc").split()
    return words if words and shutil.which(words[0]) else []


def missing_for_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> Literal["CPU", "compiler"] | None:
    """What this machine lacks for finray's own attention on a CPU; None if it has all."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "CPU"
    flags = text.partition("\nflags")[2].partition("\n")[0].split()
    if not KERNEL_FEATURES.keys() <= set(flags):
        return "CPU"
    return None if c_compiler() else "compiler"


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that processes here may have: the machine's, or less where a control group limits it. ``root`` is
    where ``proc`` and ``sys`` are."""
    limits = [int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))]
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # A group is limited by those around it too, and a container may see its own group as the root.
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and (place / file).is_file():
                text = (place / file).read_text(encoding="utf-8").strip()
                limits += [int(text)] if text.isdigit() else []
    return min(limits)


def machine_cpus() -> int:
    """CPUs that processes here may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
