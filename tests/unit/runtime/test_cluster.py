"""Placement is a pure function of what is asked and what the nodes have."""

from __future__ import annotations

import pytest

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError
from finray.planning.placement import Placement, place, worker_environment


def asked(**fields: object) -> ClusterConfig:
    return ClusterConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ({}, [{"CPU": 8.0}], Placement(1, 8, False)),
        ({"num_workers": 2}, [{"CPU": 8.0}], Placement(2, 4, False)),
        ({"num_workers": 2}, [{"CPU": 4.0}, {"CPU": 4.0}], Placement(2, 4, False)),
        ({"num_workers": 3}, [{"CPU": 4.0}, {"CPU": 4.0}], Placement(3, 2, False)),
        ({"num_workers": 1}, [{"CPU": 4.0}, {"CPU": 4.0}], Placement(1, 4, False)),
        ({"num_workers": 2}, [{"CPU": 8.0, "GPU": 2.0}], Placement(2, 4, True)),
        ({"num_workers": 2}, [{"CPU": 8.0, "GPU": 1.0}], Placement(2, 4, False)),
        ({"num_workers": 2, "use_gpu": False}, [{"CPU": 8.0, "GPU": 2.0}], Placement(2, 4, False)),
        ({"cpus_per_worker": 3}, [{"CPU": 8.0}], Placement(1, 3, False)),
    ],
)
def test_placements(fields: dict[str, object], nodes: list[dict[str, float]], expected: Placement) -> None:
    assert place(asked(**fields), nodes) == expected


@pytest.mark.parametrize(
    ("fields", "nodes", "message"),
    [
        ({"num_workers": 9}, [{"CPU": 8.0}], "room for 8"),
        ({"cpus_per_worker": 6}, [{"CPU": 4.0}, {"CPU": 4.0}], "the cluster has 8, which is room for 0"),
        ({"use_gpu": True}, [{"CPU": 8.0}], "want a GPU each, the cluster has 0"),
        ({"num_workers": 3, "use_gpu": True}, [{"CPU": 8.0, "GPU": 2.0}], "set cluster.num_workers to 2"),
    ],
)
def test_what_does_not_fit(fields: dict[str, object], nodes: list[dict[str, float]], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        place(asked(**fields), nodes)
    assert message in str(caught.value)


def test_threads_follow_the_placement_and_the_users_own_variables_win() -> None:
    env = worker_environment(asked(env={"TOKENIZERS_PARALLELISM": "true", "X": "1"}), threads=3)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["TOKENIZERS_PARALLELISM"] == "true"
    assert env["X"] == "1"
    assert "mmap_max" in env["GLIBC_TUNABLES"]
