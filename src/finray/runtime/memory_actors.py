"""In-memory checkpoints: an actor on every node, owned by the driver, so that it outlives the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from finray.errors import ClusterError
from finray.runtime.failures import describe

if TYPE_CHECKING:
    from finray.training.memory import MemoryPart

# Number of steps whose parts are kept: the newest may not be complete yet.
STEPS = 2
# How long a machine may take to answer whether it has a part. A lost one is not waited for longer.
_ANSWER_S = 20.0
_PUT_S = 300.0
_REFRESH_EVERY_S = 2.0


class CheckpointMemoryActor:
    """The actor. It stores bytes without interpreting them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int, int], tuple[dict[str, Any], Mapping[str, bytes]]] = {}

    def put(self, header: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Store a part; drop those of older steps, and of steps that an earlier attempt computed and that are now
        repeated."""
        attempt, step, _ = _key(header)
        self._parts = {key: part for key, part in self._parts.items() if key[0] == attempt or key[1] < step}
        self._parts[_key(header)] = header, files
        newest = sorted({key[1] for key in self._parts})[-STEPS:]
        self._parts = {key: part for key, part in self._parts.items() if key[1] in newest}

    def headers(self) -> list[dict[str, Any]]:
        """Headers of the stored parts."""
        return [header for header, _ in self._parts.values()]

    def get(self, key: tuple[str, int, int]) -> Mapping[str, bytes] | None:
        """The files of a part, if it is there."""
        part = self._parts.get(tuple(key))  # type: ignore[arg-type]
        return None if part is None else part[1]


def _key(header: Mapping[str, Any]) -> tuple[str, int, int]:
    return header["attempt"], header["step"], header["rank"]


def name_of(group: str, node: str) -> str:
    """The name of a node's actor."""
    return f"{group} memory {node}"


class MemoryActors:
    """The driver's side: one actor on every current and future node, ended with the run.

    Args:
        ray: the module, connected.
        group: prefix of the names of what belongs to the run.
        head: returns whether Ray's head process can be reached.
        clock: seconds, monotonic.
    """

    def __init__(
        self, ray: Any, group: str, *, head: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ray, self._group, self._head, self._clock = ray, group, head, clock
        self._actors: dict[str, Any] = {}
        self._next = clock()

    def refresh(self) -> None:
        """Start missing actors; called repeatedly."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._clock() < self._next:
            return
        self._next = self._clock() + _REFRESH_EVERY_S
        if not self._head():
            # The calls would wait for it and, after a minute, end this process.
            return
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        for node in alive - self._actors.keys():
            # It holds much memory, for which the system may kill it alone: it starts again, empty.
            self._actors[node] = (
                self._ray.remote(CheckpointMemoryActor)
                .options(
                    num_cpus=0,
                    name=name_of(self._group, node),
                    max_concurrency=4,
                    max_restarts=-1,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote()
            )
        for node in self._actors.keys() - alive:
            del self._actors[node]

    def close(self) -> None:
        """End them all."""
        for actor in self._actors.values():
            with suppress(Exception):
                self._ray.kill(actor)
        self._actors = {}


class RayMemory:
    """A worker's side; see :class:`finray.training.memory.Memory`.

    Args:
        group: as for :class:`MemoryActors`.
        nodes: of all ranks, by rank.
        rank: of this worker.
    """

    def __init__(self, group: str, nodes: Sequence[str], rank: int) -> None:
        ring = list(dict.fromkeys(nodes))
        here = ring.index(nodes[rank])
        self._group = group
        # With a single node there is no second copy: the part survives the workers, not the node.
        self._mine = list(dict.fromkeys([ring[here], ring[(here + 1) % len(ring)]]))

    def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
        """Store a part on this node and the next one.
        Raises ClusterError: one of them did not take it; the other may have it."""
        import ray

        header = {name: getattr(part, name) for name in ("attempt", "step", "rank", "world_size", "size")}
        header["digests"] = dict(part.digests)
        reference = ray.put(files)
        failures: list[Exception] = []
        for node in self._mine:
            # One of the two may have gone.
            try:
                ray.get(self._actor(node).put.remote(header, reference), timeout=_PUT_S)
            except Exception as error:
                failures.append(error)
        if failures:
            # Where the actor itself raised, Ray's error has that of the actor.
            cause = getattr(failures[0], "cause", None)
            why = describe(cause if isinstance(cause, Exception) else failures[0])
            raise ClusterError(f"{len(failures)} of {len(self._mine)} machines did not take it ({why})")

    def parts(self) -> list[MemoryPart]:
        """Parts stored on any node that answers."""
        from finray.training.memory import MemoryPart

        parts = {}
        for headers in self._answers(lambda actor: actor.headers.remote()):
            parts.update({_key(header): MemoryPart(**header) for header in headers})
        return list(parts.values())

    def get(self, part: MemoryPart) -> Mapping[str, bytes] | None:
        """The files of a part, from the first node that has it."""
        key = part.attempt, part.step, part.rank
        return next((files for files in self._answers(lambda actor: actor.get.remote(key)) if files is not None), None)

    def _answers(self, ask: Callable[[Any], Any]) -> list[Any]:
        import ray

        asked, answers = [], []
        # A node may be gone, or new.
        for node in [node["NodeID"] for node in ray.nodes() if node["Alive"]]:
            with suppress(Exception):
                asked.append(ask(self._actor(node)))
        # All are waited for at once: several lost ones take no longer than one.
        ready = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)[0] if asked else []
        for answer in ready:
            with suppress(Exception):
                answers.append(ray.get(answer))
        return answers

    def _actor(self, node: str) -> Any:
        import ray

        try:
            return ray.get_actor(name_of(self._group, node))
        except ValueError:
            raise ClusterError(f"no process keeps checkpoints in memory on node {node[:8]}") from None
