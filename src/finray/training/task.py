"""What training asks of a task. The loop knows no task by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.config.tasks import TaskSpec
from finray.data.dataset.prepared import PreparedSplit
from finray.records import Confusion

WeightArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]


class Batch(Protocol):
    """A micro-batch, made by a task and read by it alone."""

    def to(self, device: torch.device) -> Self:
        """The batch on a device, without waiting for it."""

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, from which a GPU can copy by itself."""


class SavedLayout(Protocol):
    """What is saved of a model, and under which names."""

    @property
    def stem(self) -> str:
        """Name of the weights' file, without its suffix."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved, by name; tensors may be shards."""

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written, given full tensors of :meth:`tensors`."""

    def load(self, folder: Path, files: Collection[str] | None = None) -> None:
        """Put saved weights into the model, sharded or not; of a verified directory only the ``files`` that it lists.

        Raises:
            ModelError: they are of another model.
        """

    def save_settings(self, folder: Path) -> None:
        """Write the configuration files that belong beside the weights."""


class Task(Protocol):
    """A model and what is learned by it.

    Attributes:
        spec: what can be said of the task without torch.
        model: the Transformers or PEFT model, which is counted and saved.
        module: what is called for a forward pass; a strategy may wrap it.
        layout: what is saved of the model.
    """

    spec: TaskSpec
    model: Any
    module: torch.nn.Module
    layout: SavedLayout

    @classmethod
    def build(cls, config: Config, resolved: Resolved, *, device: torch.device, seed: int, on_meta: bool) -> Self:
        """Load the model with its adapter, or build it on the meta device, to be sharded and filled later.

        Raises:
            ModelError: it cannot be loaded.
        """

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""

    def initialised_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that got their values here and not from a file: equal on all ranks after a broadcast."""

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters."""

    def collate(self, split: PreparedSplit, rows: Sequence[int]) -> Batch:
        """Rows of a prepared split as a micro-batch."""

    def weight(self, split: PreparedSplit) -> WeightArray:
        """Weight of each row in the loss: its targets, or that of its class. The loss is divided by the sum over the
        global batch."""

    def loss_sum(self, batch: Any) -> torch.Tensor:
        """The loss summed over a batch (fp32 scalar)."""

    def metric_count(self, rows: int) -> int:
        """How many numbers :meth:`score` accumulates when so many rows are evaluated: sums, and where a metric needs
        all rows at once (a rank, say) a place for each, which the sum over the ranks fills."""

    def score(self, batch: Any, sums: torch.Tensor) -> None:
        """Add a batch's share of the metrics to ``sums`` (fp64, ``metric_count`` long, on the device)."""

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics, from sums over all rows; the names of :attr:`TaskSpec.best` and others."""

    def confusion(self, sums: Sequence[float]) -> Confusion:
        """Rows by their class and the predicted one, from the same sums; empty where there is no such matrix."""
