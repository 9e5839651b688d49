"""Ray Train without the processes that a run of ours does not need.

Every actor is a process that costs a start one to two seconds of CPU, and Ray Train starts six beside the workers. Some
are switched off by environment variables (:mod:`finray.runtime.cluster`). The methods that :class:`Trainer` overrides
for the others are private in Ray 2.60: a version of Ray that does not call them starts those processes as usual. One
that has moved the modules imported here fails, so pyproject.toml names the version.
"""

from __future__ import annotations

from typing import Any

from ray.train import BackendConfig
from ray.train.backend import Backend
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

# What a run never uses: data sets of Ray Data.
_UNUSED = {"DatasetsCallback"}
# What is of no use where Ray ends with the run: the removal of placement groups that a dead controller leaves behind.
_UNUSED_ALONE = {"PlacementGroupCleanerCallback"}


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function in every worker.

    Args:
        function: of the workers; it also joins their process group, because Ray's own back end for that would import
            torch here and in the controller.
        alone: Ray was started for this run, and ends with it.
        options: as Ray's trainer takes them.
    """

    def __init__(self, function: Any, *, alone: bool, **options: Any) -> None:
        super().__init__(function, backend_config=_Config(), **options)
        self._alone = alone

    def _create_default_callbacks(self) -> list[Any]:
        unused = _UNUSED | _UNUSED_ALONE if self._alone else _UNUSED
        return [one for one in super()._create_default_callbacks() if type(one).__name__ not in unused]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        if self._alone and type(arguments.get("scaling_policy")) is FixedScalingPolicy:
            arguments["scaling_policy"] = _FixedSize(self.scaling_config)
        return super()._initialize_and_run_controller(**arguments)


class _FixedSize(FixedScalingPolicy):  # type: ignore[misc]
    """Asks no autoscaler for nodes: there is none, and the actor that would be asked is waited for."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing is asked for."""

    def _maybe_send_resource_request(self) -> None:
        """Nothing is asked for."""


class _Devices(Backend):  # type: ignore[misc]
    # As Ray's torch back end: NCCL reaches the GPUs of the other workers on a node.
    share_cuda_visible_devices = True


class _Config(BackendConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[Backend]:
        return _Devices
