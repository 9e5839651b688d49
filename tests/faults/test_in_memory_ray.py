"""A worker that dies between two checkpoints on storage: the run continues from the memory of the cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finray.errors import ClusterError
from finray.records import Note, Record, RunHeader, TrainRecord
from finray.runtime import driver
from finray.training.memory import MemoryPart
from tests.support import runs

KILL_AT = 6


class KillsOnce:
    """A tracker that kills the other worker after a step."""

    def start(self, run: Any) -> None:
        self._run_dir = Path(run.run_dir)

    def log(self, record: Any) -> None:
        mark = self._run_dir / "killed"
        if isinstance(record, TrainRecord) and record.step >= KILL_AT and not mark.exists():
            mark.touch()
            os.kill(runs.read_workers(self._run_dir)[1]["pid"], signal.SIGKILL)

    def finish(self) -> None: ...


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_in_memory(
    tiny_run: Callable[..., runs.Plain], ray_cluster: str
) -> None:
    changes = {"train.max_steps": 16, "checkpoint": {"every_steps": 100, "in_memory_every": 1}}
    changes |= {"cluster": {"num_workers": 2, "max_failures": 2}}
    plain = tiny_run(changes | {"tracking.trackers": [f"{__name__}:KillsOnce"]})
    told: list[Record] = []
    result = driver.train(runs.config_of(plain), handle=told.append)
    _, second = (place for place, one in enumerate(told) if isinstance(one, RunHeader))
    header = told[second]
    reached = max(one.step for one in told[:second] if isinstance(one, TrainRecord))
    assert reached >= KILL_AT
    assert reached - 1 <= header.step <= reached + 1
    assert any(isinstance(one, Note) and "from the cluster's memory" in one.message for one in told)
    undisturbed = runs.changed(plain, {"tracking.trackers": [], "run.name": "undisturbed"})
    assert runs.trace(driver.train(runs.config_of(undisturbed)).run_dir) == runs.trace(result.run_dir)

    import ray

    from finray.runtime import cluster as clusters

    with clusters.connected(runs.config_of(plain).cluster):
        assert [name for name in ray.util.list_named_actors(all_namespaces=False) if " memory " in name] == []


def test_a_keeper_that_is_killed_alone_starts_again(ray_cluster: str) -> None:
    """It holds much memory, so the system may choose it where there is none left."""
    import ray

    from finray.runtime.memory_actors import MemoryActors, RayMemory, name_of

    node = ray.get_runtime_context().get_node_id()
    actors = MemoryActors(ray, "a run", head=lambda: True)
    actors.refresh()
    try:
        keeper = ray.get_actor(name_of("a run", node))
        os.kill(ray.get(keeper.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        memory, part = RayMemory("a run", [node], 0), MemoryPart("attempt", 3, 0, 1, {"file": "digest"}, 5)

        def is_kept() -> bool:
            with suppress(ClusterError):
                memory.put(part, {"file": b"bytes"})
            return bool(memory.parts())

        runs.wait_until(is_kept)
        assert [one.step for one in memory.parts()] == [3]
        # One that only one of two machines has is there, and that it is not on both is said.
        two, later = RayMemory("a run", [node, "f" * 56], 0), replace(part, step=4)
        with pytest.raises(ClusterError, match=r"1 of 2 machines did not take it.*on node ffffffff"):
            two.put(later, {"file": b"more"})
        assert sorted(one.step for one in memory.parts()) == [3, 4]
        assert memory.get(later) == {"file": b"more"}
    finally:
        actors.close()
