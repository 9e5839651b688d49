"""The interface of objectives. A task gives the outputs of a forward pass; an objective makes a loss of them.

The loop and the step know no objective by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from finray.config.objectives import ObjectiveSpec
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Values
from finray.records import Confusion

WeightArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]


class Objective(Protocol):
    """What a model is trained for; one object for each run.

    Attributes:
        spec: what is known of it without torch.
    """

    spec: ObjectiveSpec

    @classmethod
    @abstractmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:
        """For a run, as it was decided, and the device of its model."""

    @abstractmethod
    def weight(self, split: PreparedSplit) -> WeightArray:
        """Weight of each row: its number of targets, or 1. The loss and the named sums are divided by the sum over the
        global batch, which is known before the step."""

    def values(self, split: PreparedSplit, rows: Sequence[int]) -> Values:
        """Numbers of rows, by name, which the batch carries to :meth:`loss_sum`: an array per row or per target. By
        default the columns of :attr:`ObjectiveSpec.columns`, once they have been computed."""
        names = [name for name in self.spec.columns if name in split.columns]
        return {name: np.concatenate([split.column(name, row) for row in rows]) for name in names}

    def column(self, name: str, outputs: torch.Tensor, batch: Any) -> torch.Tensor:  # noqa: ARG002
        """A column's numbers for the K targets of a batch, from what the model gives that a run begins from. By default
        the outputs themselves: log-probabilities of a reference."""
        return outputs

    @abstractmethod
    def loss_sum(self, outputs: torch.Tensor, batch: Any, sums: torch.Tensor) -> torch.Tensor:
        """The loss summed over a batch (fp32 scalar).

        Args:
            outputs: what :attr:`ObjectiveSpec.reads` names.
            batch: the rows, with their values.
            sums: fp64, one for each name of :attr:`ObjectiveSpec.means`, on the device: the batch's are added.
        """

    @abstractmethod
    def metric_count(self, rows: int) -> int:
        """Length of ``sums`` in :meth:`score` for this many rows: sums, and one slot per row if a metric needs all rows
        at once (a rank statistic, for example), which the sum over the ranks fills."""

    @abstractmethod
    def score(self, outputs: torch.Tensor, batch: Any, sums: torch.Tensor) -> None:
        """Add a batch's contribution to ``sums`` (fp64, ``metric_count`` long, on the device)."""

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of an evaluation, from sums over all rows; includes the one that :attr:`TaskSpec.best` names."""

    def confusion(self, sums: Sequence[float]) -> Confusion:  # noqa: ARG002
        """The confusion matrix, by class and predicted class, from the same sums; empty for objectives without one."""
        return []


class MeanObjective(Objective):
    """An objective whose evaluation is its loss: ``eval_loss``, and the means that training records. What is left to
    write is ``spec``, :meth:`weight`, :meth:`batch_weight` and :meth:`loss_sum`."""

    @classmethod
    def build(cls, config: Config, execution: Execution, *, device: torch.device) -> Self:  # noqa: ARG003
        """Without settings."""
        return cls()

    @abstractmethod
    def batch_weight(self, batch: Any) -> float:
        """The sum of the weights of a batch's rows."""

    def metric_count(self, rows: int) -> int:  # noqa: ARG002
        """The loss, the weight, and the named sums."""
        return 2 + len(self.spec.means)

    def score(self, outputs: torch.Tensor, batch: Any, sums: torch.Tensor) -> None:
        """Add the loss, the weight, and the named sums."""
        sums[0] += self.loss_sum(outputs, batch, sums[2:]).double()
        sums[1] += self.batch_weight(batch)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Means over the rows' weight."""
        loss, weight, *named = sums
        means = dict(zip(self.spec.means, (value / weight for value in named), strict=True))
        return {"eval_loss": loss / weight, **means}
