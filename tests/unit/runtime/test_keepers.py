"""Processes that keep checkpoints in memory, without Ray."""

from __future__ import annotations

from typing import Any

from finray.runtime.keepers import Keepers


class Nodes:
    """Stands for Ray, with no nodes; counts who asks."""

    asked = 0

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        return []


def test_a_head_that_is_gone_is_not_asked_for_nodes() -> None:
    """The call would wait for it, and end the command after a minute."""
    ray, now, reached = Nodes(), [0.0], [False]
    keepers = Keepers(ray, "a run", head=lambda: reached[0], clock=lambda: now[0])
    for now[0] in (0.0, 5.0, 10.0):
        keepers.look()
    assert ray.asked == 0
    reached[0] = True
    for now[0] in (15.0, 15.1, 20.0):
        keepers.look()
    assert ray.asked == 2
