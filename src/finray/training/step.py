"""One optimizer step: forward, loss, backward, one all-reduce, one update. Also one evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from finray.data.sampling.order import derive_key
from finray.parallel.base import NamedOptimizer, Strategy
from finray.records import Confusion
from finray.training.evaluator import OnProgress
from finray.training.loader import EvalLoader, StepData
from finray.training.nonfinite import NonFiniteGuard
from finray.training.profile import Parts, no_parts
from finray.training.pulse import Pulse
from finray.training.state import TrainState
from finray.training.task import Task, TaskBatch


def reseed(key: int, step: int, micro_batch: int) -> None:
    """Seed the random generators of torch (CPU and GPU), NumPy and Python for one micro-batch.

    Saved generator states become wrong as soon as the number of workers changes, and every library has its own. So each
    micro-batch is seeded separately: dropout depends on the micro-batch and not on the rank, and a checkpoint only has
    to store one integer. The price: another ``train.micro_batch_size`` draws other dropout masks.
    """
    seed = derive_key(key, step, micro_batch)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class Signals(NamedTuple):
    """What ranks tell each other with the loss of a step: each 0 or 1 of one rank, and then the number of ranks.

    Attributes:
        written: this rank has written its part of the pending checkpoint.
        requested: this rank has received a request.
        evaluated: asynchronous evaluations have finished; on rank 0.
    """

    written: float = 0.0
    requested: float = 0.0
    evaluated: float = 0.0


NO_SIGNALS = Signals()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Scalars of a whole step, on the device: reading one blocks until the step is done."""

    loss: torch.Tensor  # fp64, mean over the global batch
    grad_norm: torch.Tensor  # before clipping
    signals: torch.Tensor  # fp64, the fields of `Signals`, summed over the ranks
    sums: torch.Tensor  # fp64, of the names in `ObjectiveSpec.means`, over the global batch


def train_step(
    task: Task,
    strategy: Strategy,
    optimizer: NamedOptimizer,
    data: StepData,
    state: TrainState,
    guard: NonFiniteGuard,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    signals: Signals = NO_SIGNALS,
    parts: Parts = no_parts,
    pulse: Pulse | None = None,
) -> StepResult:
    """Run one step without waiting for the device.

    Each micro-batch's summed loss is divided by the weight of the *whole* step before its backward pass, so the result
    is the gradient of one mean over the global batch, however it was split. The weight is known from the prepared rows,
    without communication. With a mean of means, the weight of a token would depend on its micro-batch.

    ``signals`` and the objective's named sums are summed over the ranks with the loss, and ``pulse`` is told when this
    rank has finished its part.
    """
    objective = task.objective
    if objective.spec.before:
        with parts("forward"):
            compute_before(task, strategy, data.before)
    # The loss comes first: a ring sums the first element in the same order, however many follow.
    named = 1 + len(signals)
    total = torch.zeros(named + len(objective.spec.means), dtype=torch.float64, device=strategy.device)
    for position, value in enumerate(signals, start=1):
        if value:
            total[position] = value
    left = len(data.micro_batches) + len(data.dummy_batches)
    for index, batch in data.micro_batches:
        reseed(state.random_key, state.step, index)
        with parts("forward"):
            batch = _given(task, batch, strategy.device)
            loss = objective.loss_sum(task.outputs(batch), batch, total[named:])
        left -= 1
        with parts("backward"):
            strategy.backward(guard.scale(loss / data.weight), last=not left)
        total[0] += loss.detach().double()
    for batch in data.dummy_batches:
        # The other ranks communicate in every forward and backward pass, so this one takes part; it adds nothing.
        left -= 1
        batch = _given(task, batch, strategy.device)
        ignored = torch.zeros_like(total[named:])
        strategy.backward(objective.loss_sum(task.outputs(batch), batch, ignored) * 0.0, last=not left)
    parameters = list(optimizer.parameters.values())
    if pulse is not None:
        pulse.waits()
    with parts("all_reduce"):
        total = strategy.all_reduce_gradients(parameters, total)
    with parts("clip"):
        guard.unscale(strategy, parameters)
        norm = strategy.clip_grad_norm(parameters, max_grad_norm)
    mean = total[0] / data.weight
    with parts("optimizer"):
        optimizer.step(learning_rate, found_inf=guard.observe(state.step + 1, mean, norm, data.samples))
    return StepResult(mean, norm.detach(), total[1:named], total[named:])


def compute_before(task: Task, strategy: Strategy, batches: Iterable[tuple[TaskBatch, bool]]) -> None:
    """Give the objective the sums over the global batch that its losses depend on, from this rank's batches; False
    marks one that adds nothing. A collective, without gradients and dropout; nothing if the objective asks for none.
    """
    objective, names = task.objective, task.objective.spec.before
    if not names:
        return
    sums = torch.zeros(len(names), dtype=torch.float64, device=strategy.device)
    is_training = task.model.training
    task.model.eval()
    with torch.no_grad():
        for batch, counts in batches:
            batch = _given(task, batch, strategy.device)
            objective.add_before(task.outputs(batch), batch, sums if counts else torch.zeros_like(sums))
    task.model.train(is_training)
    objective.known = dict(zip(names, strategy.all_reduce(sums), strict=True))


@torch.no_grad()
def evaluate(
    task: Task, strategy: Strategy, loader: EvalLoader, on_progress: OnProgress = lambda share: None
) -> tuple[dict[str, float], Confusion]:
    """The objective's metrics and confusion matrix over all ranks' evaluation rows; only sums are kept on the device
    and all-reduced. ``on_progress`` is given the share of this rank's forward passes that are done."""
    objective = task.objective
    compute_before(task, strategy, loader.batches_before())
    sums = torch.zeros(objective.metric_count(loader.rows), dtype=torch.float64, device=strategy.device)
    for number, (batch, counts) in enumerate(loader.batches()):
        on_progress(number / loader.passes)
        batch = _given(task, batch, strategy.device)
        objective.score(task.outputs(batch), batch, sums if counts else torch.zeros_like(sums))
    total = strategy.all_reduce(sums).tolist()
    return objective.metrics(total), objective.confusion(total)


def _given(task: Task, batch: Any, device: torch.device) -> Any:
    """A batch on the device, with what the reference makes of it, if that is computed in the step."""
    batch = batch.to(device)
    return batch if task.in_step is None else task.in_step(batch)
