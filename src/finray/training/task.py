"""The interface of tasks. The loop knows no task by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.config.tasks import TaskSpec
from finray.data.dataset.prepared import PreparedSplit
from finray.records import Confusion

WeightArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]


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
    """A model and its training objective.

    Attributes:
        spec: what is known of the task without torch.
        model: the Transformers or PEFT model, whose parameters are counted and saved.
        module: called for a forward pass; a strategy may wrap it.
        layout: the saved tensors of the model.
    """

    spec: TaskSpec
    model: Any
    module: torch.nn.Module
    layout: CheckpointLayout

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

    def collate(self, split: PreparedSplit, rows: Sequence[int]) -> TaskBatch:
        """Collate rows of a prepared split into a micro-batch."""

    def weight(self, split: PreparedSplit) -> WeightArray:
        """Weight of each row in the loss: its number of targets, or the weight of its class. The loss is divided by the
        sum over the global batch."""

    def loss_sum(self, batch: Any) -> torch.Tensor:
        """The loss summed over a batch (fp32 scalar)."""

    def metric_count(self, rows: int) -> int:
        """Length of ``sums`` in :meth:`score` for this many rows: sums, and one slot per row if a metric needs all rows
        at once (a rank statistic, for example), which the sum over the ranks fills."""

    def score(self, batch: Any, sums: torch.Tensor) -> None:
        """Add a batch's contribution to ``sums`` (fp64, ``metric_count`` long, on the device)."""

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics, from sums over all rows; includes those named in :attr:`TaskSpec.best`."""

    def confusion(self, sums: Sequence[float]) -> Confusion:
        """The confusion matrix, by class and predicted class, from the same sums; empty for tasks without one."""
