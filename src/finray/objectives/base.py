"""The interface of objectives. A task gives the outputs of a forward pass; an objective makes a loss of them.

The loop and the step know no objective by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from finray.config.objectives import ObjectiveSpec
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.collate import Row, Values
from finray.records import Confusion

WeightArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]


class Objective(Protocol):
    """What a model is trained for; one object for each run.

    Attributes:
        spec: what is known of it without torch.
        known: the sums of :attr:`ObjectiveSpec.before` over the global batch (fp64 scalars on the device), by name; the
            same on every rank. In an evaluation the global batch is all of its rows.
    """

    spec: ObjectiveSpec
    known: Mapping[str, torch.Tensor] = MappingProxyType({})

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

    def row_before(self, split: PreparedSplit, row: int) -> Row:
        """Token ids and loss mask that are read instead of a row in the pass before a step, for
        :meth:`add_before`; by default the row itself."""
        return split.row(row)

    def values_before(self, split: PreparedSplit, rows: Sequence[int]) -> Values:
        """As :meth:`values`, for that pass: by default the columns, of what it reads."""
        names = [name for name in self.spec.columns if of_before(name) in split.columns]
        return {name: np.concatenate([split.column(of_before(name), row) for row in rows]) for name in names}

    def add_before(self, outputs: torch.Tensor, batch: Any, sums: torch.Tensor) -> None:  # noqa: ARG002
        """Add a batch's contribution to the sums that :attr:`ObjectiveSpec.before` names (fp64, on the device). The
        outputs have no gradient and are without dropout. Called only if the spec names some."""
        assert not self.spec.before, f"{self.spec.name} names sums and adds nothing to them"

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

    def recorded(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        """What records have of the named sums over rows of this weight: by default each divided by it."""
        return {name: value / weight for name, value in zip(self.spec.means, sums, strict=True)}

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


def of_before(column: str) -> str:
    """The name of a column's numbers for what :meth:`Objective.row_before` gives."""
    return f"{column}_before"


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
        return {"eval_loss": loss / weight, **self.recorded(named, weight)}
