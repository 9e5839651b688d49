"""One optimizer step: forward, loss, backward, one sum over the ranks, one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from finray.data.sampling.collate import Batch
from finray.parallel.base import NamedOptimizer, Strategy
from finray.training.loader import StepData
from finray.training.nonfinite import Watch
from finray.training.profile import Parts, no_parts
from finray.training.randomness import reseed
from finray.training.state import TrainState


class Task(Protocol):
    """What training asks of a task. The loop knows no task by name."""

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The loss summed over a batch's targets (fp32 scalar)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Numbers of a whole step, on the device: reading one waits for the step.

    Attributes:
        loss: per target (fp64 scalar).
        grad_norm: before clipping (scalar).
        done: how many ranks said ``done`` (fp64 scalar).
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    done: torch.Tensor


def train_step(
    task: Task,
    strategy: Strategy,
    optimizer: NamedOptimizer,
    data: StepData,
    state: TrainState,
    watch: Watch,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    done: bool = False,
    parts: Parts = no_parts,
) -> StepResult:
    """Do one step; nothing here waits for the device.

    Each micro-batch's summed loss is divided by the targets of the *whole* step before its backward pass, so the
    gradient that comes out is that of one mean over the global batch, however it was cut up.
    """
    total = torch.zeros(2, dtype=torch.float64, device=strategy.device)
    total[1] = float(done)
    left = len(data.shares) + len(data.fillers)
    for index, batch in data.shares:
        reseed(state.random_key, state.step, index)
        with parts("forward"):
            loss = task.loss_sum(batch.to(strategy.device))
        left -= 1
        with parts("backward"):
            strategy.backward(watch.scale(loss / data.supervised), last=not left)
        total[0] += loss.detach().double()
    for batch in data.fillers:
        # Here only because the others meet in every forward and backward pass; it adds nothing.
        left -= 1
        strategy.backward(task.loss_sum(batch.to(strategy.device)) * 0.0, last=not left)
    parameters = list(optimizer.parameters.values())
    with parts("sum over ranks"):
        total = strategy.all_reduce_gradients(parameters, total)
    with parts("clip"):
        watch.unscale(strategy, parameters)
        norm = strategy.clip_grad_norm(parameters, max_grad_norm)
    mean = total[0] / data.supervised
    with parts("optimizer"):
        optimizer.step(learning_rate, found_inf=watch.look(state.step + 1, mean, norm, data.samples))
    return StepResult(mean, norm.detach(), total[1])


@torch.no_grad()
def evaluate(task: Task, strategy: Strategy, batches: list[tuple[Batch, bool]]) -> tuple[float, int]:
    """Loss per target over all ranks' batches that count, and the number of targets."""
    sums = torch.zeros(2, dtype=torch.float64, device=strategy.device)
    for batch, counts in batches:
        loss = task.loss_sum(batch.to(strategy.device)).double()
        if counts:
            sums[0] += loss
            sums[1] += len(batch.targets_K)
    strategy.all_reduce(sums)
    return float(sums[0] / sums[1]), int(sums[1])
