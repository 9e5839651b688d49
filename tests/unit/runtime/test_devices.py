"""Memory of GPUs by name, and of this machine within the limits of its control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finray.errors import ConfigError
from finray.planning.devices import GPUS, gpu_named, gpu_of, machine_memory

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_names_tell_the_memory() -> None:
    for name, gpu in GPUS.items():
        advertised = int(name.rsplit("-", 1)[1].removesuffix("gb"))
        assert 0.89 < gpu.memory / (advertised * 2**30) < 1.03
    assert gpu_named("H100-80GB") is GPUS["h100-80gb"]
    with pytest.raises(ConfigError, match="no GPU is called `h100`"):
        gpu_named("h100")


def test_gpus_of_a_cluster() -> None:
    assert gpu_of([{"GPU": 1, "accelerator_type:T4": 1}, {"GPU": 1, "accelerator_type:H100": 1}]) == GPUS["t4-16gb"]
    assert gpu_of([{"GPU": 1, "accelerator_type:T4": 1}, {"GPU": 1, "accelerator_type:X": 1}]) is None
    assert gpu_of([{"GPU": 1}]) is None
    # What a node without a GPU says does not count.
    assert gpu_of([{"accelerator_type:T4": 1}]) is None


def group(root: Path, lines: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines, encoding="utf-8")
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return root


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == TOTAL
    two = {"a/b/memory.max": "max\n", "a/memory.max": f"{2**30}\n"}
    assert machine_memory(group(tmp_path / "2", "0::/a/b\n", two)) == 2**30
    one = {"memory/docker/memory.limit_in_bytes": f"{2**29}\n", "memory/memory.limit_in_bytes": f"{2**63}\n"}
    assert machine_memory(group(tmp_path / "1", "5:cpu,memory:/docker\n3:pids:/x\n", one)) == 2**29
    # A container sees its own group as the root.
    assert machine_memory(group(tmp_path / "c", "0::/hidden/path\n", {"memory.max": f"{2**28}\n"})) == 2**28


def test_no_limit_is_the_whole_machine(tmp_path: Path) -> None:
    assert machine_memory(group(tmp_path, "0::/a\n", {"a/memory.max": "max\n"})) == TOTAL
