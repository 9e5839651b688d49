"""The loop: bookkeeping around the step. It knows nothing of Ray, of tasks, or of strategies by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from finray.config.schema import Config
from finray.data.collate import Batch
from finray.errors import TrainingError
from finray.parallel.base import Strategy, Updates
from finray.tracking.base import Tracker
from finray.training.feed import Ahead, Feed, StepData
from finray.training.saving import Saver
from finray.training.schedule import learning_rate
from finray.training.snapshot import SavedTask, take
from finray.training.state import TrainState
from finray.training.step import StepResult, Task, evaluate, train_step


class TrainedTask(Task, SavedTask, Protocol):
    """A task that can be put in training mode and saved."""

    model: Any


@dataclass
class Loop:
    """One rank's part of a run.

    Attributes:
        config: the run's configuration.
        task: model and loss.
        strategy: how ranks share the work.
        optimizer: over the task's trainable parameters.
        feed: the data of each step.
        evaluation: this rank's evaluation batches and whether they count, or None when nothing is held out.
        total_steps: optimizer steps of the run.
        epoch_items: packs (or rows) in an epoch.
        state: where the run stands.
        saver: writes checkpoints.
        trackers: where metrics go (empty on other ranks).
        save_extras: writes what else belongs in a checkpoint (tokenizer, template).
        reported: called on every rank after each checkpoint, with its directory and metrics.
        clock: seconds, monotonic.
    """

    config: Config
    task: TrainedTask
    strategy: Strategy
    optimizer: Updates
    feed: Feed
    evaluation: list[tuple[Batch, bool]] | None
    total_steps: int
    epoch_items: int
    state: TrainState
    saver: Saver
    trackers: list[Tracker]
    save_extras: Callable[[Path], None]
    reported: Callable[[Path, dict[str, float]], None]
    clock: Callable[[], float] = time.perf_counter
    phases: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0, "data_wait": 0.0}
    )
    last_eval: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None

    def __post_init__(self) -> None:
        self._window = _Window()
        # Reused by every snapshot: fresh memory costs more than copying.
        self._copies: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Train from where the state stands to the end.

        Raises:
            FinrayError: on every rank alike.
        """
        if self.state.step >= self.total_steps:
            return
        self.task.model.train()
        ahead = Ahead(self.feed.at, self.state.position, clock=self.clock)
        try:
            while self.state.step < self.total_steps:
                started = self.clock()
                waited = ahead.waited
                data = ahead.take(last=self.state.step + 1 == self.total_steps)
                rate = learning_rate(self.config.train, update=self.state.updates, total=self.total_steps)
                result = train_step(
                    self.task,
                    self.strategy,
                    self.optimizer,
                    data,
                    self.state,
                    learning_rate=rate,
                    max_grad_norm=self.config.train.max_grad_norm,
                    done=self.saver.is_done,
                )
                seconds = self.clock() - started
                self._advance(data, seconds)
                self.first_loss = result.loss if self.first_loss is None else self.first_loss
                self.final_loss = result.loss
                self.phases["data_wait"] += ahead.waited - waited
                self._window.add(data, result, seconds, ahead.waited - waited)
                if result.done == self.strategy.world_size:
                    self._finish_saving()
                self._after_step(data, rate)
        finally:
            ahead.close()
            self.saver.close()

    def _advance(self, data: StepData, seconds: float) -> None:
        state = self.state
        state.step += 1
        state.updates += 1
        state.position += data.items
        state.tokens += data.tokens
        state.supervised += data.supervised
        state.seconds += seconds
        self.phases["train"] += seconds

    def _after_step(self, data: StepData, rate: float) -> None:
        config, step = self.config, self.state.step
        last = step == self.total_steps
        if last or step % config.tracking.log_every == 0:
            self._log({"kind": "train", **self._record(data, rate)})
            self._window = _Window()
        every = config.evaluation.every_steps
        saving = last or step % config.checkpoint.every_steps == 0
        self.last_eval = None
        if self.evaluation is not None and (last or (every is not None and step % every == 0)):
            self._evaluate(self.evaluation)
        if saving:
            self._save(last=last)

    def _record(self, data: StepData, rate: float) -> dict[str, Any]:
        window = self._window
        record = {
            "step": self.state.step,
            "epoch": round(self.state.position / self.epoch_items, 6),
            "loss": window.loss,
            "grad_norm": window.grad_norm,
            "lr": rate,
            "tokens": self.state.tokens,
            "supervised": window.supervised,
            "samples_digest": data.digest,
            "tokens_per_s": round(window.tokens / max(window.seconds, 1e-9), 3),
            "data_wait_s": round(window.waited, 6),
            "peak_memory_bytes": peak_memory(self.strategy.device),
            "seconds": round(self.state.seconds, 6),
        }
        if self.config.tracking.record_samples:
            record["samples"] = list(window.samples)
        return record

    def _evaluate(self, batches: list[tuple[Batch, bool]]) -> None:
        started = self.clock()
        self.task.model.eval()
        loss, targets = evaluate(self.task, self.strategy, batches)
        self.task.model.train()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the evaluation loss is {loss} at step {self.state.step}",
                repair="look at the held-out rows, or lower train.learning_rate; the last checkpoint is good",
            )
        seconds = self.clock() - started
        self.phases["evaluate"] += seconds
        self.last_eval = loss
        if self.state.best_eval_loss is None or loss < self.state.best_eval_loss:
            self.state.best_eval_loss = loss
        self._log(
            {
                "kind": "eval",
                "step": self.state.step,
                "eval_loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "eval_targets": targets,
                "eval_seconds": round(seconds, 6),
            }
        )

    def _save(self, *, last: bool) -> None:
        started = self.clock()
        self._finish_saving()
        metrics = {} if self.last_eval is None else {"eval_loss": self.last_eval}
        behind = self.config.checkpoint.asynchronous and not last
        snapshot = take(
            self.task, self.optimizer, self.state, self.strategy, others=self.save_extras, buffers=self._buffers(behind)
        )
        self.saver.begin(snapshot, step=self.state.step, metrics=metrics)
        if not behind:
            self._finish_saving()
        self.phases["checkpoint"] += self.clock() - started

    def _buffers(self, behind: bool) -> dict[str, torch.Tensor] | None:
        return self._copies if behind else None

    def _finish_saving(self) -> None:
        """Make what was written behind the training a checkpoint, and tell Ray."""
        saved = self.saver.finish()
        if saved is not None:
            self.reported(saved.path, {"step": float(saved.step), **saved.metrics})

    def _log(self, record: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(record)


@dataclass
class _Window:
    """Means and sums since the last record."""

    loss: float = 0.0
    supervised: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    grad_norm: float = 0.0
    samples: list[int] = field(default_factory=list)

    def add(self, data: StepData, result: StepResult, seconds: float, waited: float) -> None:
        self.supervised += data.supervised
        # A running mean: for a window of one step it is that step's loss to the last bit.
        self.loss += (result.loss - self.loss) * (data.supervised / self.supervised)
        self.tokens += data.tokens
        self.seconds += seconds
        self.waited += waited
        self.grad_norm = result.grad_norm
        self.samples.extend(data.samples)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: the GPU's allocator where there is one, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
