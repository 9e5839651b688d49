"""One optimizer step: forward, loss, backward, one sum over the ranks, one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from finray.data.collate import Batch
from finray.errors import TrainingError
from finray.parallel.base import Strategy, Updates
from finray.training.feed import StepData
from finray.training.randomness import reseed
from finray.training.state import TrainState


class Task(Protocol):
    """What training asks of a task. The loop knows no task by name."""

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The loss summed over a batch's targets (fp32 scalar)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss per target and gradient norm (before clipping) of the whole step, and how many ranks said ``done``."""

    loss: float
    grad_norm: float
    done: int = 0


def train_step(
    task: Task,
    strategy: Strategy,
    optimizer: Updates,
    data: StepData,
    state: TrainState,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    done: bool = False,
) -> StepResult:
    """Do one step.

    Each micro-batch's summed loss is divided by the targets of the *whole* step before its backward pass, so the
    gradient that comes out is that of one mean over the global batch, however it was cut up.

    Raises:
        TrainingError: loss or gradient is not finite; raised on every rank, before any weight is changed.
    """
    total = torch.zeros(2, dtype=torch.float64, device=strategy.device)
    total[1] = float(done)
    left = len(data.shares) + len(data.fillers)
    for index, batch in data.shares:
        reseed(state.random_key, state.step, index)
        loss = task.loss_sum(batch.to(strategy.device))
        left -= 1
        strategy.backward(loss / data.supervised, last=not left)
        total[0] += loss.detach().double()
    for batch in data.fillers:
        # Here only because the others meet in every forward and backward pass; it adds nothing.
        left -= 1
        strategy.backward(task.loss_sum(batch.to(strategy.device)) * 0.0, last=not left)
    parameters = list(optimizer.parameters.values())
    total = strategy.sum_gradients(parameters, total)
    norm = strategy.clip(parameters, max_grad_norm)
    (summed, ranks_done), norm_value = total.tolist(), float(norm)
    loss_value = summed / data.supervised
    _require_finite(loss_value, norm_value, state.step + 1, data)
    optimizer.update(learning_rate)
    return StepResult(loss_value, norm_value, round(ranks_done))


def _require_finite(loss: float, norm: float, step: int, data: StepData) -> None:
    finite = torch.isfinite(torch.tensor([loss, norm], dtype=torch.float64))
    if bool(finite.all()):
        return
    what = f"the gradient norm is {norm}" if bool(finite[0]) else f"the loss is {loss}"
    rows = ", ".join(map(str, data.samples[:16])) + (", ..." if len(data.samples) > 16 else "")
    raise TrainingError(
        f"{what} at step {step}; no weight was changed",
        where=f"prepared rows {rows}",
        repair="lower train.learning_rate, lengthen the warm-up, or look at these rows; the last checkpoint is good",
    )


@torch.no_grad()
def evaluate(task: Task, strategy: Strategy, batches: list[tuple[Batch, bool]]) -> tuple[float, int]:
    """Loss per target over all ranks' batches that count, and the number of targets."""
    sums = torch.zeros(2, dtype=torch.float64, device=strategy.device)
    for batch, counts in batches:
        loss = task.loss_sum(batch.to(strategy.device)).double()
        if counts:
            sums[0] += loss
            sums[1] += len(batch.targets_K)
    strategy.sum(sums)
    return float(sums[0] / sums[1]), int(sums[1])
