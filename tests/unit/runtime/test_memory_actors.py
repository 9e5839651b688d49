"""Processes that keep checkpoints in memory, without Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from finray.runtime.memory_actors import MemoryActors, RayMemory


class Nodes:
    """Stands for Ray, with no nodes; counts who asks."""

    asked = 0

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        return []


def test_a_head_that_is_gone_is_not_asked_for_nodes() -> None:
    """The call would wait for it, and end the command after a minute."""
    ray, now, reached = Nodes(), [0.0], [False]
    actors = MemoryActors(ray, "a run", head=lambda: reached[0], clock=lambda: now[0])
    for now[0] in (0.0, 5.0, 10.0):
        actors.refresh()
    assert ray.asked == 0
    reached[0] = True
    for now[0] in (15.0, 15.1, 20.0):
        actors.refresh()
    assert ray.asked == 2


def test_all_nodes_are_asked_at_once_and_lost_ones_cost_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, float]] = []
    header = {"attempt": "a", "step": 4, "rank": 0, "world_size": 1, "size": 1, "digests": {}}

    def wait(asked: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waits.append((num_returns, timeout))
        return [one for one in asked if "lost" not in one], [one for one in asked if "lost" in one]

    def get(reference: str) -> list[dict[str, Any]]:
        if "dies" in reference:
            raise RuntimeError("it died while it answered")
        return [header]

    def actor(name: str) -> Any:
        if "new" in name:
            raise ValueError("no such actor")
        return SimpleNamespace(headers=SimpleNamespace(remote=lambda: name))

    nodes = [{"NodeID": name, "Alive": name != "dead"} for name in ("lost 1", "here", "lost 2", "new", "dies", "dead")]
    ray = SimpleNamespace(nodes=lambda: nodes, wait=wait, get=get, get_actor=actor)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert [part.step for part in RayMemory("a run", ["here"], 0).parts()] == [4]
    assert waits == [(4, 20.0)]
