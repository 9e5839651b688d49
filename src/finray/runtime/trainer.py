"""Ray Train without the processes that our runs do not need, and with a driver that watches the run.

Every actor is a process whose start costs one to two seconds of CPU, and Ray Train starts six besides the workers. Some
are switched off by environment variables (:mod:`finray.runtime.cluster`). For the others, :class:`Trainer` overrides
methods that are private in Ray 2.60: a version that does not call them starts those processes as usual. One that has
moved the modules imported here fails, so pyproject.toml pins the version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
import psutil
import ray
from ray.train import BackendConfig
from ray.train.backend import Backend
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from finray.runtime import gcs
from finray.runtime.elastic import Elastic, Failures
from finray.runtime.progress import Address, is_gone, progress_of

# Never used by a run: datasets of Ray Data, and an actor that removes the placement groups of a dead controller. The
# driver does that with `remove_groups`, and Ray does it when the driver is dead too.
_UNUSED = {"DatasetsCallback", "PlacementGroupCleanerCallback"}


_POLL_S = 0.1
# How long a killed controller's process may take to end; without a head process, it is not told to.
_END_S = 3.0


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function in every worker.

    Args:
        function: of the workers; it also joins their process group, because Ray's torch backend would import torch here
            and in the controller.
        alone: Ray was started for this run, and ends with it.
        group: prefix of the name of the run's placement group; unique to this run.
        watch: called repeatedly during the run; an exception that it raises ends the run.
        listener: address at which the driver is told that there is room for more workers, and asked for the run's
            progress.
        expected: workers at the first start, if their number is elastic.
        evaluator: leave one worker's resources to an evaluator.
        options: as Ray's trainer takes them.
    """

    def __init__(
        self,
        function: Any,
        *,
        alone: bool,
        group: str,
        watch: Callable[[], None],
        listener: Address,
        expected: int,
        evaluator: bool,
        **options: Any,
    ) -> None:
        super().__init__(function, backend_config=_BackendConfig(), **options)
        self._alone = alone
        self._group = group
        self._watch = watch
        self._listener, self._expected, self._evaluator = listener, expected, evaluator

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in _UNUSED]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        if self.scaling_config.elasticity_enabled:
            arguments["scaling_policy"] = Elastic(
                self.scaling_config,
                group=self._group,
                listener=self._listener,
                expected=self._expected,
                evaluator=self._evaluator,
                autoscaled=not self._alone,
            )
        elif self._alone and type(arguments.get("scaling_policy")) is FixedScalingPolicy:
            arguments["scaling_policy"] = _FixedSize(self.scaling_config)
        arguments["failure_policy"] = Failures(self.run_config.failure_config, partial(progress_of, self._listener))
        arguments["callbacks"] = [*arguments["callbacks"], _NamedGroup(self._group, self._listener)]
        # As in Ray, except for the wait: Ray's has a signal handler that ends the process with exit code 1.
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        environment = {"env_vars": {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}}
        options = {"num_cpus": 0, "label_selector": here, "runtime_env": environment}
        controller = ray.remote(**options)(TrainController).remote(**arguments)
        process: psutil.Process | None = None
        try:
            run = controller.run.remote()
            while not ray.wait([run], timeout=_POLL_S)[0]:
                process = process or _process_of(controller)
                self._watch()
            ray.get(run)
            return ray.get(controller.get_result.remote())
        finally:
            # Its workers end with it. Without this it is asked to exit, and now and then hangs forever (Ray 2.60) if
            # Ray shuts down at the same moment.
            ray.kill(controller)
            if process is not None:
                # It may be creating a placement group at this moment, which `remove_groups` would not see yet.
                with suppress(psutil.TimeoutExpired):
                    process.wait(_END_S)


def _process_of(actor: Any) -> psutil.Process | None:
    """The process of an actor on this machine; None if it has none yet, or none any more, or nobody can be asked."""
    head = ray.get_runtime_context().gcs_address
    with suppress(grpc.RpcError, psutil.NoSuchProcess):
        for record in gcs.actors(head, actor_id=actor._actor_id.binary()):
            if record.pid:
                return psutil.Process(record.pid)
    return None


def remove_groups(name: str) -> None:
    """Remove the placement groups with this name prefix, and what runs in them.

    Ray keeps the group of a controller that died as long as the driver lives: anything that needs its CPUs waits
    forever.
    """
    for identity, group in placement_group_table().items():
        if group["name"].startswith(name) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(identity)))


class _NamedGroup(ControllerCallback):  # type: ignore[misc]
    """Names the placement groups that a controller creates; runs in its process, on the driver's machine."""

    def __init__(self, name: str, listener: Address) -> None:
        self._name, self._listener = name, listener

    def after_controller_start(self, train_run_context: Any) -> None:  # noqa: ARG002
        """Ray Train leaves them unnamed."""
        create = worker_group.placement_group

        def create_named(**options: Any) -> Any:
            if is_gone(self._listener):
                # Ray removes the groups of a dead driver once: one that its controller, which ends a little later, then
                # creates for a restart would keep its CPUs and GPUs as long as the cluster lives (Ray 2.60).
                os._exit(1)
            # A restart creates another one, and names must be unique.
            return create(**options, name=f"{self._name} {uuid4().hex[:8]}")

        worker_group.placement_group = create_named


class _FixedSize(FixedScalingPolicy):  # type: ignore[misc]
    """Asks no autoscaler for nodes: there is none, and the controller would wait for the actor that is asked."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing is asked for."""

    def _maybe_send_resource_request(self) -> None:
        """Nothing is asked for."""


class _Devices(Backend):  # type: ignore[misc]
    # As Ray's torch back end: NCCL reaches the GPUs of the other workers on a node.
    share_cuda_visible_devices = True


class _BackendConfig(BackendConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[Backend]:
        return _Devices
