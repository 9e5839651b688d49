"""The interface of tasks. The loop knows no task by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.config.tasks import TaskSpec
from finray.data.dataset.prepared import PreparedSplit
from finray.objectives.base import Objective


class TaskBatch(Protocol):
    """A micro-batch; created and read only by its task."""

    def to(self, device: torch.device) -> Self:
        """The batch on a device, copied without blocking."""

    def pin_memory(self) -> Self:
        """The batch in pinned memory, for asynchronous copies to a GPU."""


class CheckpointLayout(Protocol):
    """The saved tensors of a model, and their names."""

    @property
    def stem(self) -> str:
        """File name of the weights, without suffix."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors to save, by name; they may be shards."""

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to write to the file, given full tensors of :meth:`tensors`."""

    def load(self, folder: Path, files: Collection[str] | None = None) -> None:
        """Load saved weights into the model, sharded or not; from a verified directory only the ``files`` that it
        lists.
        Raises ModelError: they belong to another model."""

    def save_settings(self, folder: Path) -> None:
        """Write the configuration files that go with the weights."""


class Task(Protocol):
    """What a model is, and what its forward pass gives.

    Attributes:
        spec: what is known of the task without torch.
        objective: what it is trained for.
        model: the Transformers or PEFT model, whose parameters are counted and saved.
        module: called for a forward pass; a strategy may wrap it.
        layout: the saved tensors of the model.
        in_step: adds to a batch what the reference makes of it in the step (``preference.reference_in_step``).
    """

    spec: TaskSpec
    objective: Objective
    model: Any
    module: torch.nn.Module
    layout: CheckpointLayout
    in_step: Callable[[Any], Any] | None

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool) -> Self:
        """Load the model with its adapter, or build it on the meta device, to be sharded and loaded later.
        Raises ModelError: the model cannot be loaded."""

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The trainable parameters by name, in a fixed order."""

    def initialized_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that were initialized here and not loaded: broadcast to make them equal on all ranks."""

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters."""

    def collate(self, split: PreparedSplit, rows: Sequence[int], *, before: bool = False) -> TaskBatch:
        """Collate rows of a prepared split into a micro-batch; ``before``: for the pass before a step, where the
        objective asks for one."""

    def outputs(self, batch: Any) -> torch.Tensor:
        """What a forward pass over a batch gives: what :attr:`ObjectiveSpec.reads` of its objective names."""
