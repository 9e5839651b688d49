"""What the driver watches while Ray Train runs: requests to stop, workers that do not start, a lost Ray head."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from finray.errors import ClusterError, TrainingError
from finray.planning.placement import Placement, room
from finray.records import Beat, EvalProgress, Note, Record, RunHeader, TrainRecord
from finray.runtime.failures import LOADING, TRIES
from finray.runtime.progress import RESIZE, SAVE, Heard, Listener
from finray.runtime.pulses import EVALUATOR, UNKNOWN, Hang, Pulses, named
from finray.runtime.signals import Interrupted, Pending

# After this many seconds, report what is waited for.
SILENCE_S = 10.0
# A machine that will be gone in this time has one more checkpoint saved.
LAST_SAVE_S = 15.0
_PROBE_EVERY_S = 2.0
_RANKS_EVERY_S = 1.0
_WORKERS_EVERY_S = 5.0
# A broken connection is opened again after a second; workers that have ended leave Ray a moment to say so.
_REOPENS_S = 5.0
KINDS = ("CPU", "GPU")
_NODES_SHOWN = 8


class RunMonitor:
    """Watches a run while Ray Train executes it.

    Attributes:
        workers: description of the workers.
        listener: receives their records and sends them requests to stop; set before the first poll.
        is_lost: Ray's head process is unreachable.
        began_at: the step that the workers last started from; -1 before the first start.

    Args:
        ray: the module, connected.
        group: prefix of the name of the run's placement group.
        placement: of its workers.
        pending: the signal that requests an end.
        handle: called with records to show.
        grace_s: how long the workers may take to save a checkpoint.
        head: returns whether Ray's head process can be reached.
        raylet: returns whether Ray's process on this machine, the raylet, is there. Without it the next call of Ray's
            core that needs it ends this process, without a message. It is gone if it is missed twice in a row.
        head_patience_s: how long it may be unreachable; Ray ends this process after a minute, with little explanation.
        hang_s: how long to wait for a rank; None means forever.
        end_hanging: examines hanging ranks and ends their processes; returns what it found.
        workers: returns the workers that Ray has started.
        draining: returns Ray's names of machines that are about to be drained, and when (milliseconds since 1970).
        clock: seconds, monotonic.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        ray: Any,
        group: str,
        placement: Placement,
        pending: Pending,
        handle: Callable[[Record], None],
        *,
        grace_s: float,
        head: Callable[[], bool],
        head_patience_s: float,
        raylet: Callable[[], bool] = lambda: True,
        hang_s: float | None = None,
        end_hanging: Callable[[Hang], Sequence[str]] = lambda hang: (),
        workers: Callable[[], Sequence[Beat]] = tuple,
        draining: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        fewest, most = placement.bounds
        several = "s" if placement.num_workers > 1 else ""
        self.workers = f"{placement.num_workers} worker{several}"
        if fewest < most:
            self.workers += f" ({fewest} to {most}, as there is room)"
        self._pulses = Pulses(hang_s)
        self._pulses_change = threading.Lock()
        self._ranks_every_s = _RANKS_EVERY_S if hang_s is None else min(_RANKS_EVERY_S, hang_s / 10)
        self._end_hanging = end_hanging
        self._workers = workers
        self._looks_for_hangs = hang_s is not None
        self._hung_starts = 0
        self._draining = draining
        # How often a checkpoint was requested because of a machine.
        self._saved_for: dict[str, int] = {}
        self._world_size: int | None = None
        # The number of workers that the current ones were last asked to make room for.
        self._announced_workers = 0
        self.began_at = -1
        self.listener: Listener | None = None
        # An elastic run begins with the fewest.
        wanted = self.workers if fewest == most else f"at least {fewest} worker{'s' if fewest > 1 else ''}"
        self._waiting: Callable[[], str | None] = lambda: workers_wait(
            ray, group, f"{wanted} of {amounts(placement.resources)}", placement.resources, fewest
        )
        self._pending = pending
        self._handle = handle
        self._grace_s = grace_s
        self._head = head
        self._head_patience_s = head_patience_s
        self._raylet = raylet
        self._raylet_misses = 0
        self._has_begun = False
        self.is_lost = False
        self._is_missed = False
        self._deadline: float | None = None
        self._is_late = False
        self._step = 0
        self._clock = clock
        self._wall = wall
        now = clock()
        self._answered = now
        self._connected_at = now
        # When the next check of each kind is due.
        self._probe_at = now
        self._ranks_at = now
        self._workers_at = now
        self._waiting_at = now + SILENCE_S / 2
        self._say_at = now + SILENCE_S
        self._pause_s = SILENCE_S

    def on_record(self, record: Heard) -> None:
        """Show a record of the workers; heartbeats are kept for :class:`Pulses`, and show how an evaluation goes on."""
        if isinstance(record, Beat):
            with self._pulses_change:
                self._pulses.hear(record, self._clock())
            if record.rank == 0 and record.part and record.phase == "other":
                self._handle(EvalProgress(record.step, record.part, record.share))
            return
        if isinstance(record, RunHeader):
            self._has_begun = True
            self.began_at = record.step
            self._hung_starts = 0
            self._announced_workers = 0
            before, self._world_size = self._world_size, record.world_size
            if before not in (None, record.world_size):
                self._handle(Note(f"continuing with {record.world_size} workers, after {before}", record.step))
        if isinstance(record, TrainRecord):
            self._step = record.step
        self._handle(record)

    def resize(self, count: int) -> None:
        """There is room for this many workers: have the current ones save a checkpoint and end.

        This is repeated until they do, because they may be busy, or the request lost with a connection.
        """
        if self._deadline is None and self._has_begun and self.listener is not None:
            if count != self._announced_workers:
                self._handle(Note(f"there is room for {count} workers: saving a checkpoint to continue with them"))
            self._announced_workers = count
            self.listener.ask(RESIZE)

    def is_evaluating(self) -> bool:
        """Whether an asynchronous evaluation is running."""
        with self._pulses_change:
            return self._pulses.is_evaluating

    def poll(self) -> None:
        """Check once; called repeatedly during the run.
        Raises Interrupted: a signal requested it, and nothing can be saved, or no time is left; ClusterError: Ray is
        lost, and nothing can be saved, or no time is left; TrainingError: workers hang before they have loaded,
        again."""
        now = self._clock()
        if self.listener is None or self.listener.has_workers:
            self._connected_at = now
        if self._deadline is not None:
            # Without a head process, Ray Train would wait forever for workers that have ended.
            self._is_late = now >= self._deadline
            if self._is_late or (self.is_lost and self.listener is not None and not self.listener.has_workers):
                self.end()
            return
        if now >= self._probe_at:
            self._probe_at = now + _PROBE_EVERY_S
            if self._head():
                if self._is_missed:
                    self._handle(Note("Ray's head process answers again"))
                self._answered, self._is_missed = now, False
                # Where the head is gone as well, the workers still save a checkpoint.
                self._raylet_misses = 0 if self._raylet() else self._raylet_misses + 1
                if self._raylet_misses > 1:
                    raise ClusterError(
                        "Ray's process on this machine (the raylet) is gone: it has crashed, or was killed by a user "
                        "or by the kernel for lack of memory",
                        repair="check the kernel log (`dmesg`); the same command continues from the last checkpoint",
                    )
                if not self._raylet_misses:
                    self._look_at_nodes()
            self.is_lost = now - self._answered >= self._head_patience_s
            if not (self.is_lost or self._is_missed) and now - self._answered > _PROBE_EVERY_S:
                self._is_missed = True
                rest = f"the run continues, and stops cleanly if this lasts {self._head_patience_s:g} s"
                self._handle(Note(f"Ray's head process does not answer; {rest}", level="warning"))
        if self._ends():
            gone_s = now - self._connected_at
            if self._has_begun and 0 < gone_s < _REOPENS_S:
                return
            # A lost machine does not close its connection, but then the others wait for another one.
            if not self._has_begun or gone_s or self._waits_for() is not None:
                self.end()
            self._deadline = now + self._grace_s
            reason = "Ray's head process is gone; " if self._pending.signum is None else ""
            rest = f"for at most {self._grace_s:g} s (checkpoint.grace_seconds)"
            self._handle(Note(f"{reason}saving a checkpoint after this step, {rest}"))
            if self.listener is not None:
                self.listener.stop()
        elif not self.is_lost and self._look_at_ranks(now):
            return
        elif now >= self._waiting_at:
            self._waiting_at = now + SILENCE_S / 2
            if (text := self._waits_for()) is None:
                # It may begin at any moment until the next look.
                self._say_at, self._pause_s = now + 1.5 * SILENCE_S, SILENCE_S
            elif now >= self._say_at:
                self._pause_s *= 2
                self._say_at = now + self._pause_s
                self._handle(Note(text))

    def _waits_for(self) -> str | None:
        """What the workers wait for; None if they have a place, or nobody can be asked."""
        return self._waiting() if self._head() else None

    def _look_at_ranks(self, now: float) -> bool:
        """Report slow and hanging ranks, show the stacks of hanging ones, and end them; returns whether there were
        any."""
        if now < self._ranks_at:
            return False
        # Not in every look, because all ranks are checked: the driver's cost must not grow with the steps.
        self._ranks_at = now + self._ranks_every_s
        self._look_at_starting(now)
        with self._pulses_change:
            hang, slow = self._pulses.hung(now), self._pulses.slow()
        if slow is not None:
            self._handle(slow)
        if hang is None or not self._head():
            return False
        who = ", ".join(named(rank) for rank in hang.ranks[:4])
        more = f" and {len(hang.ranks) - 4} more" if len(hang.ranks) > 4 else ""
        restart = "so that the workers restart from the last checkpoint"
        then = "and repeated" if hang.ranks[0].rank == EVALUATOR else restart
        rest = f"it is stopped, {then} (cluster.hang_seconds)"
        self._handle(Note(f"{who}{more} {hang.why}; {rest}", hang.ranks[0].step, "warning"))
        for text in self._end_hanging(hang):
            self._handle(Note(text, hang.ranks[0].step, "warning"))
        with self._pulses_change:
            self._pulses.ended(hang, self._clock())
        if hang.ranks[0].step == LOADING:
            self._hung_starts += 1
            if self._hung_starts == TRIES:
                raise TrainingError(
                    f"workers hung {TRIES} times before they had loaded: {who}{more} {hang.why}",
                    repair="the warnings show where they hang; workers must be able to connect to this machine, and "
                    "cluster.hang_seconds gives them more time",
                )
        return True

    def _look_at_starting(self, now: float) -> None:
        """Ask Ray which workers it has started: those that hang before their first report are known to nobody else."""
        if not self._looks_for_hangs or now < self._workers_at:
            return
        self._workers_at = now + _WORKERS_EVERY_S
        with self._pulses_change:
            is_training = self._pulses.is_training
        if not is_training and not self._head():
            # The call would wait for it and, after a minute, end this process.
            return
        with suppress(Exception):
            workers = () if is_training else self._workers()
            with self._pulses_change:
                self._pulses.expect(workers, now)

    def _look_at_nodes(self) -> None:
        """Request a checkpoint when a machine with workers is about to be drained, and one more shortly before."""
        nodes: Mapping[str, int] = {}
        with suppress(Exception):
            nodes = self._draining()
        with self._pulses_change:
            hosts = self._pulses.hosts()
        for node in nodes.keys() & hosts.keys():
            left = nodes[node] / 1000 - self._wall()
            times = 1 if left > LAST_SAVE_S else 2
            if self._saved_for.get(node, 0) >= times:
                continue
            is_first, self._saved_for[node] = node not in self._saved_for, times
            if self.listener is not None:
                self.listener.ask(SAVE)
            when = "is about to be removed" if is_first else f"will be gone in {left:.0f} s"
            self._handle(Note(f"{hosts[node]} {when}: saving a checkpoint after this step", 0, "warning"))

    def _ends(self) -> bool:
        """Whether the run has to end early."""
        return self._pending.signum is not None or self.is_lost

    def reaches_head(self) -> bool:
        """Whether Ray's head process answers; asked now, because nobody looks at it while a checkpoint is saved."""
        return not self.is_lost and self._head()

    def raise_if_ending(self) -> None:
        """Raise the reason if the run failed while it was to end early, or because of that."""
        if self._ends():
            self.end()

    def end(self) -> NoReturn:
        """Raise the reason why the run ended early."""
        if self._pending.signum is not None:
            raise Interrupted(self._pending.signum, late=self._step if self._is_late else None)
        raise ClusterError(
            "Ray's head process (the GCS) is gone: it was killed, or its machine was lost",
            repair="start the cluster again, then run the same command: it continues from the last checkpoint",
        )


def is_refused(address: str, *, timeout: float = 2.0) -> bool:
    """Whether nobody listens at ``host:port``. A machine that is busy, or out of sockets, says nothing of it."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def refusal(address: str, *, timeout: float = 2.0) -> str | None:
    """Why no connection to ``host:port`` is possible; None if there is one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error).lower()
    return None


# --- who has the cluster's resources ---------------------------------------------------------------------------------


def amounts(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words: ``4 CPUs, 1 GPU``."""
    return ", ".join(
        f"{resources[kind]:g} {kind}{'s' * (resources[kind] != 1)}" for kind in KINDS if resources.get(kind)
    )


def waiting_text(
    what: str,
    *,
    total: Mapping[str, float],
    free: Mapping[str, float],
    held: Sequence[tuple[str, Mapping[str, float]]],
    nodes: Sequence[Mapping[str, Any]] = (),
    free_there: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """What is waited for, how much of it is free on which node, who holds the rest, and which nodes are dead.

    Args:
        what: what is waited for.
        total, free: resources of the cluster.
        held: the holders and their resources.
        nodes: of the cluster, as in ``ray.nodes()``.
        free_there: free resources by node id.
    """
    left = ", ".join(f"{free.get(kind, 0):g} of {total[kind]:g} {kind}s" for kind in KINDS if total.get(kind))
    counts: Counter[str] = Counter()
    for who, resources in held:
        if part := amounts(resources):
            counts[f"{who} ({part})"] += 1
    holders = [f"{count} x {holder}" if count > 1 else holder for holder, count in counts.most_common(8)]
    rest = "; held by " + ", ".join(holders) if holders else ""
    alive = [node for node in nodes if node["Alive"] and amounts(node["Resources"])]
    if len(alive) > 1:
        each = []
        for node in alive[:_NODES_SHOWN]:
            has = (free_there or {}).get(node["NodeID"], {})
            part = ", ".join(
                f"{has.get(kind, 0):g} of {node['Resources'][kind]:g} {kind}s"
                for kind in KINDS
                if node["Resources"].get(kind)
            )
            each.append(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has {part}")
        more = f" and {len(alive) - _NODES_SHOWN} more nodes" if len(alive) > _NODES_SHOWN else ""
        rest += "; " + ", ".join(each) + more
    # To Ray, a node that came back is a new one.
    there = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    gone = {
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in nodes
        if not node["Alive"] and node["NodeManagerAddress"] not in there
    }
    rest += f"; lost: {', '.join(sorted(gone)[:_NODES_SHOWN])}" if gone else ""
    return f"waiting for {what}: {left} are free{rest}"


def holders(ray: Any) -> list[tuple[str, dict[str, float]]]:
    """Holders of resources of the cluster: placement groups, and actors outside of them. Ray has no table of tasks."""
    from finray.runtime import gcs

    holding: list[tuple[str, dict[str, float]]] = []
    for identity, group in ray.util.placement_group_table().items():
        if group["state"] == "CREATED":
            whole: Counter[str] = Counter()
            for bundle in group["bundles"].values():
                whole.update(bundle)
            holding.append((f"placement group {group['name'] or identity[:8]}", dict(whole)))
    for actor in gcs.actors(ray.get_runtime_context().gcs_address, state=gcs.ALIVE):
        if not actor.placement_group_id.strip(b"\xff"):
            holding.append((f"actor {actor.name or actor.class_name}", dict(actor.required_resources)))
    return holding


def workers_of(ray: Any, group: str) -> list[Beat]:
    """The processes of a run's workers, as heartbeats of an unknown rank; ``group`` begins the names of its placement
    groups."""
    from finray.runtime import gcs

    groups = {
        identity for identity, placed in ray.util.placement_group_table().items() if placed["name"].startswith(group)
    }
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    context = ray.get_runtime_context()
    beats = []
    for actor in gcs.actors(context.gcs_address, job_id=bytes.fromhex(context.get_job_id())):
        if actor.pid and actor.placement_group_id.hex() in groups and actor.class_name == "RayTrainWorker":
            node = actor.address.node_id.hex()
            beats.append(Beat("", UNKNOWN, hosts.get(node, ""), actor.pid, node, LOADING))
    return beats


def waiting_for(ray: Any, what: str) -> str | None:
    """:func:`waiting_text` for the connected cluster; None if it cannot be queried."""
    with suppress(Exception):
        from finray.runtime import gcs

        nodes, there = ray.nodes(), gcs.available_resources(ray.get_runtime_context().gcs_address)
        total, free = ray.cluster_resources(), ray.available_resources()
        return waiting_text(what, total=total, free=free, held=holders(ray), nodes=nodes, free_there=there)
    return None


def workers_wait(ray: Any, group: str, what: str, each: Mapping[str, float], count: int) -> str | None:
    """The same for a run's workers, while no placement group with this prefix has its resources. An elastic run creates
    none before there is room.

    Args:
        ray: the module, connected.
        group: prefix of the name of the run's placement groups.
        what: the workers in words.
        each: resources of one.
        count: how many there are at least.
    """
    with suppress(Exception):
        groups = [placed for placed in ray.util.placement_group_table().values() if placed["name"].startswith(group)]
        if not any(placed["state"] == "CREATED" for placed in groups):
            from finray.runtime import gcs

            free = gcs.available_resources(ray.get_runtime_context().gcs_address)
            if room(free.values(), each, most=count) >= count:
                return f"Ray has room for {what}, and is starting {'it' if count == 1 else 'them'}"
            return waiting_for(ray, what)
    return None
