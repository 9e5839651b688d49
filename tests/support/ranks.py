"""Ranks as threads of one process, for what they exchange as objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Group:
    """Ranks as threads."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self._barrier = threading.Barrier(world, timeout=30)
        self._values: list[Any] = [None] * world

    def rank(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return SimpleNamespace(
            rank=rank,
            world_size=self.world_size,
            all_gather_object=gather,
            broadcast_object=lambda value: gather(value)[0],
            save_library_checkpoint=lambda folder: False,
        )

    def run(self, action: Callable[[Any], Any]) -> list[Any]:
        """What each rank comes to: a result or an error."""
        found: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            try:
                found[rank] = action(self.rank(rank))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found
