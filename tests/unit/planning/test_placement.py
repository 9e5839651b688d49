"""Placement is a pure function of what is asked and what the nodes have; what GPUs and this machine have."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError, ConfigError
from finray.hardware import cpu_has_bf16, machine_memory
from finray.planning.placement import (
    GPUS,
    Device,
    Placement,
    crowded,
    device_of,
    gpu_named,
    gpu_of,
    local_gpus,
    place,
    room,
    share,
    slow_precision,
    worker_environment,
)

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def asked(**fields: object) -> ClusterConfig:
    return ClusterConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ({}, [{"CPU": 8.0}], Placement(1, 8, False)),
        ({"num_workers": 2}, [{"CPU": 8.0}], Placement(2, 4, False)),
        ({"num_workers": 2}, [{"CPU": 4.0}, {"CPU": 4.0}], Placement(2, 4, False)),
        ({"num_workers": 3}, [{"CPU": 4.0}, {"CPU": 4.0}], Placement(3, 2, False)),
        ({"num_workers": 2}, [{"CPU": 8.0, "GPU": 2.0}], Placement(2, 4, True)),
        ({"num_workers": 2}, [{"CPU": 8.0, "GPU": 1.0}], Placement(2, 4, False)),
        ({"num_workers": 2, "use_gpu": False}, [{"CPU": 8.0, "GPU": 2.0}], Placement(2, 4, False)),
        ({"cpus_per_worker": 3}, [{"CPU": 8.0}], Placement(1, 3, False)),
        # A worker's CPUs are on a machine with its GPU.
        ({"num_workers": 4}, [{"CPU": 64.0}, *[{"CPU": 8.0, "GPU": 2.0}] * 2], Placement(4, 4, True)),
        ({"num_workers": 4, "use_gpu": False}, [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 2.0}], Placement(4, 16, False)),
        # As many as there is room for, and what is left of the CPUs for each.
        ({"num_workers": {"min": 1, "max": 4}}, [{"CPU": 8.0}], Placement(4, 2, False, fewest=1, most=4)),
        ({"num_workers": {"max": 4}}, [{"CPU": 3.0}], Placement(3, 1, False, fewest=1, most=4)),
        (
            {"num_workers": {"max": 4}, "cpus_per_worker": 4},
            [{"CPU": 4.0}, {"CPU": 7.0}],
            Placement(2, 4, False, fewest=1, most=4),
        ),
        (
            {"num_workers": {"max": 8}},
            [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}],
            Placement(2, 4, True, fewest=1, most=8),
        ),
        (
            {"num_workers": 4, "gpus_per_worker": 0.5},
            [{"CPU": 8.0, "GPU": 2.0}],
            Placement(4, 2, True, gpus_per_worker=0.5),
        ),
        # An elastic number follows what lies on one machine, not the sums.
        (
            {"num_workers": {"max": 16}, "cpus_per_worker": 4, "use_gpu": True},
            [{"CPU": 64.0}, *[{"CPU": 16.0, "GPU": 8.0}] * 2],
            Placement(8, 4, True, fewest=1, most=16),
        ),
        (
            {"num_workers": {"max": 16}, "use_gpu": True},
            [{"CPU": 4.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 2.0}],
            Placement(6, 1, True, fewest=1, most=16),
        ),
        # An evaluator has what one worker more would have.
        ({}, [{"CPU": 8.0}], Placement(1, 4, False, evaluator=True)),
        ({"cpus_per_worker": 2}, [{"CPU": 4.0}], Placement(1, 2, False, evaluator=True)),
        ({}, [{"CPU": 8.0, "GPU": 2.0}], Placement(1, 4, True, evaluator=True)),
    ],
)
def test_placements(fields: dict[str, object], nodes: list[dict[str, float]], expected: Placement) -> None:
    assert place(asked(**fields), nodes, evaluator=expected.evaluator) == expected


@pytest.mark.parametrize(
    ("fields", "nodes", "message"),
    [
        ({"num_workers": 9}, [{"CPU": 8.0}], "enough for 8"),
        ({"cpus_per_worker": 6}, [{"CPU": 4.0}, {"CPU": 4.0}], "the cluster has 8, enough for 0"),
        ({"use_gpu": True}, [{"CPU": 8.0}], "need a GPU each, but the cluster has 0"),
        ({"num_workers": 3, "use_gpu": True}, [{"CPU": 8.0, "GPU": 2.0}], "set cluster.num_workers to 2"),
        ({"num_workers": {"min": 3, "max": 9}}, [{"CPU": 2.0}], "set cluster.num_workers.min to 2"),
        (
            {"num_workers": 3, "use_gpu": True, "gpus_per_worker": 0.6},
            [{"CPU": 8.0, "GPU": 2.0}],
            "0.6 of a GPU each, but the cluster has room for 2 such shares",
        ),
        # The CPUs of a machine without a GPU are of no use to workers with one.
        (
            {"num_workers": 16, "cpus_per_worker": 4},
            [{"CPU": 64.0}, *[{"CPU": 16.0, "GPU": 8.0}] * 2],
            "the machines with a GPU have 32 CPUs, and room for 8 such workers",
        ),
        ({"num_workers": 8}, [{"CPU": 64.0}, {"CPU": 4.0, "GPU": 8.0}], "set cluster.num_workers to 4 or less"),
    ],
)
def test_what_does_not_fit(fields: dict[str, object], nodes: list[dict[str, float]], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        place(asked(**fields), nodes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "nodes", "parts"),
    [
        ({}, [{"CPU": 1.0}], ("1 worker and an evaluator of 1 CPU each", "mode to inline")),
        ({"cpus_per_worker": 4}, [{"CPU": 4.0}], ("of 4 CPUs each", "or cluster.cpus_per_worker lower")),
        # The workers have the GPUs, and are not made to do without.
        ({}, [{"CPU": 8.0, "GPU": 1.0}], ("1 worker and an evaluator need a GPU each", "a cluster with one more GPU")),
        (
            {"num_workers": 2, "cpus_per_worker": 4},
            [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 64.0}],
            ("room for 2 such workers", "mode to inline, or cluster.num_workers to 1 or less"),
        ),
    ],
)
def test_an_evaluator_that_has_no_room_is_an_error(
    fields: dict[str, object], nodes: list[dict[str, float]], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ClusterError) as caught:
        place(asked(**fields), nodes, evaluator=True)
    assert caught.value.where == "evaluation.mode=async"
    for part in parts:
        assert part in str(caught.value)
    # Without one they fit.
    place(asked(**fields), nodes)


def test_threads_follow_the_placement_and_the_users_own_variables_win() -> None:
    env = worker_environment(asked(env={"TOKENIZERS_PARALLELISM": "true", "X": "1"}), threads=3, environ={})
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["TOKENIZERS_PARALLELISM"] == "true"
    assert env["X"] == "1"
    assert "mmap_max" in env["GLIBC_TUNABLES"]
    assert env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in worker_environment(
        asked(), threads=3, environ={"DNNL_PRIMITIVE_CACHE_CAPACITY": "9"}
    )
    assert worker_environment(asked(), threads=3, environ={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    # Threads that wait leave the core to others, unless the user says how they wait.
    assert int(env["GOMP_SPINCOUNT"]) < 300_000
    assert "GOMP_SPINCOUNT" not in worker_environment(asked(env={"OMP_WAIT_POLICY": "active"}), threads=3, environ={})


# --- what a worker runs on ------------------------------------------------------------------------------------------


def test_names_tell_the_memory() -> None:
    for name, gpu in GPUS.items():
        advertised = int(name.rsplit("-", 1)[1].removesuffix("gb"))
        assert 0.89 < gpu.memory / (advertised * 2**30) < 1.03
    assert gpu_named("H100-80GB") is GPUS["h100-80gb"]
    assert gpu_named("h100") is GPUS["h100-80gb"]
    assert gpu_named("MI300X").tflops == 1307
    assert gpu_named("b300").memory > gpu_named("b200").memory
    assert gpu_of([{"GPU": 8, "accelerator_type:AMD-Instinct-MI300X-OAM": 1}]) == GPUS["mi300x-192gb"]
    with pytest.raises(ConfigError, match=r"(?s)`a100` comes with several.*a100-40gb, a100-80gb$"):
        gpu_named("a100")
    with pytest.raises(ConfigError, match="no GPU is called `h101`"):
        gpu_named("h101")


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
    assert machine_memory(group(tmp_path / "n", "0::/a\n", {"a/memory.max": "max\n"})) == TOTAL


def test_a_worker_has_its_share_of_the_node_with_the_least() -> None:
    nodes = [{"CPU": 8.0, "memory": 100.0}, {"CPU": 4.0, "memory": 40.0}]
    assert device_of(Placement(3, 4, False), nodes) == Device("cpu", "a node", 40, cpu_has_bf16())
    assert device_of(Placement(1, 8, False), nodes).memory == 100
    # GPUs before Ampere have no bf16.
    two = Placement(2, 1, True)
    assert device_of(two, [{"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0}]).bf16 is False
    assert device_of(two, [{"CPU": 4.0, "GPU": 2.0, "accelerator_type:A100": 1.0}]).bf16 is True
    assert device_of(two, [{"CPU": 4.0, "GPU": 2.0}]).memory is None


def test_a_precision_that_is_emulated_and_cores_that_others_have_are_warned_of() -> None:
    old, new = Device("cpu", "a node", None, bf16=False), Device("cpu", "a node", None)
    assert "bf16 instructions: fp32 is" in str(slow_precision("bf16", old))
    assert "or fp16" in str(slow_precision("bf16", Device("cuda", "t4-16gb", 2**34, bf16=False)))
    assert "in fp16" in str(slow_precision("fp16", new))
    assert slow_precision("bf16", new) is slow_precision("fp32", old) is None
    assert "set cluster.cpus_per_worker to 7," in str(crowded(70.4, cores=32, threads=20))
    assert crowded(43.9, cores=32, threads=20) is crowded(70.4, cores=32, threads=1) is None


def test_the_rate_of_a_gpu_is_known_by_its_drivers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA GeForce RTX 4090": 165, "Quadro P400": None}
    found = [SimpleNamespace(name=name, total_memory=2**34, major=8) for name in rates]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    assert {gpu.name: gpu.tflops for gpu in local_gpus()} == rates


@pytest.mark.parametrize(
    ("free", "each", "most", "count"),
    [
        ([{"CPU": 4.0}, {"CPU": 3.0}], {"CPU": 2.0}, 9, 3),
        ([{"CPU": 4.0}, {"CPU": 4.0}], {"CPU": 2.0}, 3, 3),
        ([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}], {"CPU": 1.0, "GPU": 1.0}, 9, 1),
        # 0.3 // 0.1 is 2.0 in floats.
        ([{"CPU": 9.0, "GPU": 0.3}], {"CPU": 1.0, "GPU": 0.1}, 9, 3),
        # A share lies on one GPU.
        ([{"CPU": 9.0, "GPU": 2.5}], {"CPU": 1.0, "GPU": 0.5}, 9, 5),
        ([{"CPU": 9.0, "GPU": 2.0}], {"CPU": 1.0, "GPU": 0.6}, 9, 2),
        ([], {"CPU": 1.0}, 9, 0),
    ],
)
def test_room_is_counted_by_nodes(free: list[dict[str, float]], each: dict[str, float], most: int, count: int) -> None:
    assert room(free, each, most=most) == count


def test_bounds_of_workers_are_in_order() -> None:
    with pytest.raises(ValueError, match="min \\(3\\) is more than max \\(2\\)"):
        asked(num_workers={"min": 3, "max": 2})


SMALL, LARGE = {"CPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "replicas", "one_gpu", "each"),
    [
        ([SMALL], 2, False, {"CPU": 2}),
        ([SMALL], 4, True, {"CPU": 1}),
        # As many as on the machine with the fewest: nothing lies on two.
        ([SMALL, {"CPU": 7}], 3, False, {"CPU": 3}),
        ([SMALL, {"CPU": 1}], 2, False, {"CPU": 2}),
        # GPUs come first; where a replica can use one alone, the others stay free.
        ([LARGE], 2, False, {"CPU": 4, "GPU": 2}),
        ([LARGE], 2, True, {"CPU": 4, "GPU": 1}),
        ([SMALL, LARGE, LARGE], 3, False, {"CPU": 4, "GPU": 2}),
    ],
)
def test_replicas_get_as_much_as_all_can_have_on_one_machine(
    nodes: list[dict[str, float]], replicas: int, one_gpu: bool, each: dict[str, int]
) -> None:
    assert share(nodes, replicas, free=nodes, one_gpu=one_gpu, where="--replicas") == each
    # Beside others, what these leave, unless that is too little for all.
    if replicas <= 2:
        left = [{"CPU": 2.0, "GPU": 2.0 if nodes == [LARGE] else 0.0}]
        less = {"CPU": 1} | ({"GPU": 1} if "GPU" in each else {})
        assert share(nodes, replicas, free=left, one_gpu=one_gpu, where="--replicas") == less
    assert share(nodes, replicas, free=[{}], one_gpu=one_gpu, where="--replicas") == each


@pytest.mark.parametrize(
    ("nodes", "said", "repair"),
    [
        ([SMALL], "9 replicas need a CPU each, and the cluster has 4 CPUs on 1 machine", "ask for 4 or fewer"),
        ([LARGE, SMALL], "a CPU and a GPU each, and the cluster has 12 CPUs and 4 GPUs on 2 machines", "4 or fewer"),
        ([{"GPU": 2.0}], "the cluster has 0 CPUs and 2 GPUs", "join a cluster"),
    ],
)
def test_replicas_that_never_fit_are_refused_with_the_numbers(
    nodes: list[dict[str, float]], said: str, repair: str
) -> None:
    with pytest.raises(ClusterError, match=said) as refused:
        share(nodes, 9, free=nodes, one_gpu=False, where="--replicas")
    assert repair in str(refused.value)
