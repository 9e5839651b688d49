"""Decisions of Ray Train's controller: the number of workers at a start, and which failures count.

Ray's own elastic policy (2.60) learns of nodes from an actor that polls every 20 s and counts resources held by others
as free; and to grow a group it ends the workers without a checkpoint. Here the free resources are read when they are
needed, and a group that is to grow is first asked for a checkpoint: its workers end with :class:`Resize`, which is not
a failure. Ray's policy is the base class, because it asks the autoscaler for nodes if there is one.

The methods and attributes that begin with an underscore are private in Ray 2.60.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import ray
from ray.train import FailureConfig, ScalingConfig, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.util.placement_group import placement_group_table

from finray.planning.placement import room
from finray.runtime import gcs
from finray.runtime.failures import WouldRepeat
from finray.runtime.nodes import joined
from finray.runtime.progress import Address, is_evaluating, resize_to
from finray.runtime.watch import refusal

# How long the resources of ended workers may take to become free, before fewer workers start.
SETTLE_S = 10.0
_PAUSE_S = 0.2
_ASKED_AT_ONCE = 64


class Resize(Exception):
    """Ends every worker of a group that has saved a checkpoint, so that another number of workers continues."""


def workers_to_start(possible: int, *, fewest: int, expected: int, waited_s: float) -> int | None:
    """The number of workers to start; None to wait.

    Args:
        possible: workers for which there is room now, up to the maximum.
        fewest: the minimum.
        expected: workers for which there is soon room, as far as is known.
        waited_s: seconds since the previous workers ended.
    """
    if possible < fewest or (possible < expected and waited_s < SETTLE_S):
        return None
    return possible


class Elastic(ElasticScalingPolicy):  # type: ignore[misc]
    """The number of workers follows the free resources of the cluster, between two bounds.

    Args:
        scaling_config: with both bounds.
        group: prefix of the name of the run's placement groups, whose resources belong to the run.
        listener: address at which the driver is told that there is room for more.
        expected: workers at the first start.
        evaluator: leave one worker's resources to an evaluator.
        autoscaled: there may be an autoscaler to ask for nodes.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        *,
        group: str,
        listener: Address,
        expected: int,
        evaluator: bool,
        autoscaled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scaling_config)
        self._group, self._listener = group, listener
        self._evaluator, self._autoscaled = evaluator, autoscaled
        self._expected, self._clock = expected, clock
        self._waiting_since: float | None = None
        self._looked_at = clock()
        self._silent: set[str] = set()

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ask the autoscaler for resources for the maximum number of workers."""
        if self._autoscaled:
            super().after_controller_start(train_run_context)

    def _maybe_send_resource_request(self) -> None:
        if self._autoscaled:
            super()._maybe_send_resource_request()

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Start as many as there is room for, or wait."""
        self._maybe_send_resource_request()
        now = self._clock()
        possible, at_best = self._room(afresh=self._waiting_since is None)
        if self._waiting_since is None:
            self._waiting_since = now
        count = workers_to_start(
            possible,
            fewest=self.scaling_config.min_workers,
            # Nothing is left to wait for where a machine is lost.
            expected=min(self._expected, at_best),
            waited_s=now - self._waiting_since,
        )
        if count is None:
            # The controller asks again immediately.
            time.sleep(_PAUSE_S)
            return NoopDecision()
        self._waiting_since, self._expected, self._looked_at = None, count, now
        return self._get_resize_decision(count)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:  # noqa: ARG002
        """If there is room for more workers, have the current ones save a checkpoint and end."""
        self._maybe_send_resource_request()
        now = self._clock()
        if now - self._looked_at >= self.scaling_config.elastic_resize_monitor_interval_s:
            self._looked_at = now
            evaluates = self._evaluator and is_evaluating(self._listener)
            possible, _ = self._room(afresh=True, evaluates=evaluates)
            if possible > worker_group_state.num_workers and resize_to(self._listener, possible):
                self._expected = possible
        return NoopDecision()

    def _room(self, *, afresh: bool, evaluates: bool = False) -> tuple[int, int]:
        """How many workers there is room for on machines that answer, and how many there would be if they were idle.

        Until Ray gives up a lost machine, it counts its resources as free. Workers that were to start there would wait
        for a minute.

        Args:
            afresh: ask all machines, and not only those that did not answer the last time.
            evaluates: an evaluator is running: what it holds is not free, and nothing else is kept for it.
        """
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        asked = alive.keys() if afresh else self._silent & alive.keys()
        self._silent = silent(
            {node: joined(alive[node]["NodeManagerAddress"], alive[node]["NodeManagerPort"]) for node in asked}
        )
        nodes = alive.keys() - self._silent
        each, most, kept = (
            self.scaling_config._resources_per_worker_not_none,
            self.scaling_config.max_workers,
            int(self._evaluator),
        )
        now = room_for(each, nodes=nodes, group=self._group, most=most, kept=kept - evaluates)
        return now, room((alive[node]["Resources"] for node in nodes), each, most=most + kept) - kept


def silent(addresses: Mapping[str, str]) -> set[str]:
    """The nodes that accept no connection, of some with their addresses (``host:port``). Busy ones do accept it."""
    if not addresses:
        return set()
    with ThreadPoolExecutor(min(len(addresses), _ASKED_AT_ONCE)) as pool:
        refusals = pool.map(refusal, addresses.values())
        return {node for node, why in zip(addresses, refusals, strict=True) if why is not None}


def room_for(each: Mapping[str, float], *, nodes: Collection[str], group: str, most: int, kept: int) -> int:
    """How many workers of a run the cluster has room for, including the current ones.

    Args:
        each: resources of one worker.
        nodes: Ray's names of the machines that count, unless they are about to be drained.
        group: prefix of the name of the run's placement groups.
        most: maximum number of workers.
        kept: room for this many workers is left to others.
    """
    head = ray.get_runtime_context().gcs_address
    try:
        draining, available = gcs.draining(head), gcs.available_resources(head)
    except grpc.RpcError:
        # Asked again in a moment.
        return 0
    free = {node: amounts for node, amounts in available.items() if node in nodes and node not in draining}
    for placed in placement_group_table().values():
        # One that has lost a machine is being rescheduled, and has the resources of the others still.
        if placed["name"].startswith(group) and placed["state"] != "REMOVED":
            for index, bundle in placed["bundles"].items():
                node = placed["bundles_to_node_id"][index]
                for name, amount in bundle.items() if node in free else ():
                    free[node][name] = free[node].get(name, 0) + amount
    return room(free.values(), each, most=most + kept) - kept


class Failures(DefaultFailurePolicy):  # type: ignore[misc]
    """Counts failures of the workers without progress in between; ending to make room for more workers is not a
    failure.

    Progress is a start from a later step than the last: wherever checkpoints are kept, on a disk that this process does
    not see or in memory, the driver is told.

    Args:
        failure_config: the maximum number of failures.
        progress: returns the step that the workers last started from.
    """

    def __init__(self, failure_config: FailureConfig, progress: Callable[[], int]) -> None:
        super().__init__(failure_config)
        self._progress = progress
        self._newest = -1

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Whether the workers start again."""
        errors = list(getattr(training_failed_error, "worker_failures", {}).values())
        if errors and all(caused_by(error, Resize) for error in errors):
            return FailureDecision.RETRY
        if any(caused_by(error, WouldRepeat) for error in errors):
            return FailureDecision.RAISE
        if (newest := self._progress()) > self._newest:
            self._newest, self._worker_group_failures = newest, 0
        failure = getattr(training_failed_error, "controller_failure", None)
        if isinstance(failure, WorkerGroupStartupFailedError):
            # A worker that died while it started. Ray counts these by themselves, and without a limit.
            training_failed_error = WorkerGroupError(str(failure), {0: failure})
        return super().make_decision(training_failed_error)


def caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether a worker ended by an exception of this type, which Ray wraps."""
    causes = error, getattr(error, "_original_exception", None), error.__cause__
    return any(isinstance(cause, kind) for cause in causes)
