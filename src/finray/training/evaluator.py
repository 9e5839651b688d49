"""Interfaces for evaluation during training: answers to prompts, and evaluation of checkpoints on other resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finray.data.dataset.prepared import PreparedSplit
from finray.parallel.base import Strategy
from finray.records import Confusion
from finray.training.task import Task

# Maximum number of checkpoints with a pending evaluation, because each takes disk space. Beyond it, training waits.
MOST_OUT = 4
# Called with the share of an evaluation that is done, from 0 to 1.
OnProgress = Callable[[float], None]


class AnswerMetrics(Protocol):
    """Lets a model answer held-out prompts and scores the answers; implemented in higher-level packages and passed
    in."""

    def __call__(
        self, task: Task, split: PreparedSplit, strategy: Strategy, on_progress: OnProgress = lambda share: None
    ) -> dict[str, float]:
        """Metrics of the answers to all rows of a split, distributed over the ranks. A collective.
        Raises FinrayError: on every rank."""


@dataclass(frozen=True, slots=True)
class CheckpointScores:
    """The result of evaluating a checkpoint.

    Attributes:
        step: of the checkpoint; 0 is the model that training starts from.
        metrics: by name; empty if the evaluation failed for good.
        targets: number of targets that the loss is averaged over.
        seconds: duration.
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
    """Evaluates checkpoints one after the other while training continues; on rank 0. No call blocks."""

    def submit(self, step: int, checkpoint: Path | None) -> None:
        """Queue the evaluation of a checkpoint; None means the model that training starts from."""

    def results(self) -> Sequence[CheckpointScores]:
        """Results since the last call, in the order of submission."""

    def close(self) -> None:
        """Cancel pending evaluations."""
