"""What training asks of others in an evaluation: answers to prompts, and checkpoints evaluated on other resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finray.data.dataset.prepared import PreparedSplit
from finray.parallel.base import Strategy
from finray.records import Confusion
from finray.training.task import Task

# Checkpoints whose evaluation has not ended, at most: each of them takes room on the disk. Then training waits.
MOST_OUT = 4


class Answering(Protocol):
    """Lets a model answer held-out prompts and scores the answers; lies in rooms above, and is handed in."""

    def __call__(self, task: Task, split: PreparedSplit, strategy: Strategy) -> dict[str, float]:
        """The metrics of the answers to all rows of a split, shared out over the ranks; a collective.

        Raises:
            FinrayError: on every rank alike.
        """


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of the evaluation of a checkpoint.

    Attributes:
        step: of the checkpoint; 0 is the model that training starts from.
        metrics: by name; none where it failed for good.
        targets: that the loss is a mean over.
        seconds: that it took.
        failure: why there are no metrics.
        confusion: as in :class:`finray.records.EvalRecord`.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    targets: int = 0
    seconds: float = 0.0
    failure: str = ""
    confusion: Confusion = field(default_factory=list)


class Evaluator(Protocol):
    """Evaluates checkpoints one after the other while training goes on; on rank 0. No call waits."""

    def submit(self, step: int, checkpoint: Path | None) -> None:
        """Evaluate a checkpoint after those before it; None is the model that training starts from."""

    def results(self) -> Sequence[Evaluated]:
        """What has come since the last call, in the order of submission."""

    def close(self) -> None:
        """Give up what is out."""
