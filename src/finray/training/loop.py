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
from finray.data.sampling.collate import Batch
from finray.errors import TrainingError
from finray.parallel.base import NamedOptimizer, Strategy
from finray.tracking.base import Tracker
from finray.training.loader import Ahead, Feed, StepData
from finray.training.nonfinite import Watch
from finray.training.profile import Profiler
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
        profiler: looks at where the time goes in some steps.
    """

    config: Config
    task: TrainedTask
    strategy: Strategy
    optimizer: NamedOptimizer
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
    profiler: Profiler = field(default_factory=Profiler)
    phases: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0, "data_wait": 0.0}
    )
    last_eval: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None

    def __post_init__(self) -> None:
        self._window = _Window()
        self._watch = Watch(self.state, self.strategy.device, scaled=self.config.train.precision == "fp16")
        # Reused by every snapshot: fresh memory costs more than copying.
        self._copies: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Train from where the state stands to the end.

        Raises:
            FinrayError: on every rank alike.
        """
        if self._is_over():
            return
        self.task.model.train()
        ahead = Ahead(self.feed.at, self.state.position, clock=self.clock)
        try:
            while not self._is_over():
                started = self.clock()
                waited = ahead.waited
                self.profiler.before(self.state.step + 1)
                with self.profiler.parts("data wait"):
                    data = ahead.take(last=self.state.step + 1 == self.total_steps)
                rate = learning_rate(self.config.train, update=self.state.updates, total=self.total_steps)
                result = train_step(
                    self.task,
                    self.strategy,
                    self.optimizer,
                    data,
                    self.state,
                    self._watch,
                    learning_rate=rate,
                    max_grad_norm=self.config.train.max_grad_norm,
                    done=self.saver.is_done,
                    parts=self.profiler.parts,
                )
                self._advance(data)
                self.phases["data_wait"] += ahead.waited - waited
                self._window.add(data, result, ahead.waited - waited)
                numbers = self._read(result) if self._is_read() else None
                self._spend(self.clock() - started)
                self.profiler.after(self.state.step)
                if numbers is not None:
                    self._after_step(data, rate, numbers)
        finally:
            ahead.close()
            self.profiler.close()
            self.saver.close()

    def _is_over(self) -> bool:
        return self.state.step >= self.total_steps or self._has_stopped()

    def _has_stopped(self) -> bool:
        """Whether the evaluation loss has not fallen for so long that the run ends here."""
        stopping = self.config.evaluation.early_stopping
        return stopping is not None and self.state.stale_evaluations >= stopping.patience

    def _advance(self, data: StepData) -> None:
        state = self.state
        state.step += 1
        state.updates += 1
        state.position += data.items
        state.tokens += data.tokens
        state.supervised += data.supervised

    def _spend(self, seconds: float) -> None:
        self.state.seconds += seconds
        self._window.seconds += seconds
        self.phases["train"] += seconds

    def _is_read(self) -> bool:
        """Whether numbers are read from the device after this step; between such steps nothing waits for it."""
        step, evaluating = self.state.step, self.config.evaluation.every_steps
        intervals = [self.config.tracking.log_every, self.config.checkpoint.every_steps]
        if self.evaluation is not None and evaluating is not None:
            intervals.append(evaluating)
        return step == self.total_steps or any(step % every == 0 for every in intervals)

    def _read(self, result: StepResult) -> _Numbers:
        """Wait for the step.

        Raises:
            TrainingError: since numbers were last read, one was not finite.
        """
        numbers = self._window.read(result)
        self._watch.check(self.state)
        self.first_loss = numbers.first_loss if self.first_loss is None else self.first_loss
        self.final_loss = numbers.last_loss
        return numbers

    def _after_step(self, data: StepData, rate: float, numbers: _Numbers) -> None:
        config, step = self.config, self.state.step
        if round(numbers.done) == self.strategy.world_size:
            self._finish_saving()
        last = step == self.total_steps
        if last or step % config.tracking.log_every == 0:
            self._log_step(data, rate, numbers)
        every = config.evaluation.every_steps
        self.last_eval = None
        is_best = False
        if self.evaluation is not None and (last or (every is not None and step % every == 0)):
            is_best = self._evaluate(self.evaluation)
        if self._has_stopped() and not last:
            last = True
            if self._window.tokens:
                self._log_step(data, rate, numbers)
            self._log({"kind": "note", "step": step, "message": self._why_stopped()})
        if last or step % config.checkpoint.every_steps == 0 or (is_best and config.checkpoint.keep_best):
            self._save(last=last)

    def _log_step(self, data: StepData, rate: float, numbers: _Numbers) -> None:
        self._log({"kind": "train", **self._record(data, rate, numbers)})
        self._window = _Window()

    def _why_stopped(self) -> str:
        return (
            f"stopped early at step {self.state.step} of {self.total_steps}: the evaluation loss has not fallen in "
            f"{self.state.stale_evaluations} evaluations (evaluation.early_stopping); its lowest is "
            f"{self.state.best_eval_loss:.4f}"
        )

    def _record(self, data: StepData, rate: float, numbers: _Numbers) -> dict[str, Any]:
        window = self._window
        record: dict[str, Any] = {
            "step": self.state.step,
            "epoch": round(self.state.position / self.epoch_items, 6),
            "loss": numbers.loss,
            # Only fp16 goes on without one, and leaves the update out.
            "grad_norm": numbers.grad_norm if math.isfinite(numbers.grad_norm) else None,
            "lr": rate,
            "tokens": self.state.tokens,
            "supervised": window.supervised,
            "samples_digest": data.digest,
            "tokens_per_s": round(window.tokens / max(window.seconds, 1e-9), 3),
            "data_wait_s": round(window.waited, 6),
            "peak_memory_bytes": peak_memory(self.strategy.device),
            "seconds": round(self.state.seconds, 6),
        }
        if self.state.loss_scale is not None:
            record |= {"loss_scale": self.state.loss_scale, "skipped": self.state.skipped}
        if self.config.tracking.record_samples:
            record["samples"] = list(window.samples)
        return record

    def _evaluate(self, batches: list[tuple[Batch, bool]]) -> bool:
        """Evaluate; returns whether the loss is the lowest so far."""
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
        best = self.state.best_eval_loss
        stopping = self.config.evaluation.early_stopping
        is_gain = best is None or loss < best - (0.0 if stopping is None else stopping.min_gain)
        self.state.stale_evaluations = 0 if is_gain else self.state.stale_evaluations + 1
        is_best = best is None or loss < best
        if is_best:
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
        return is_best

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


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What was read from the device: of the window, and of its first and last step."""

    loss: float
    first_loss: float
    last_loss: float
    grad_norm: float
    done: float


@dataclass
class _Window:
    """Means and sums since the last record; the loss stays on the device."""

    loss: torch.Tensor | None = None
    first_loss: torch.Tensor | None = None
    supervised: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    samples: list[int] = field(default_factory=list)

    def add(self, data: StepData, result: StepResult, waited: float) -> None:
        self.supervised += data.supervised
        if self.loss is None:
            self.loss = self.first_loss = result.loss
        else:
            # A running mean: for a window of one step it is that step's loss to the last bit.
            self.loss = self.loss + (result.loss - self.loss) * (data.supervised / self.supervised)
        self.tokens += data.tokens
        self.waited += waited
        self.samples.extend(data.samples)

    def read(self, result: StepResult) -> _Numbers:
        assert self.loss is not None
        assert self.first_loss is not None
        values = [self.loss, self.first_loss, result.loss, result.grad_norm.double(), result.done]
        return _Numbers(*torch.stack(values).tolist())


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: the GPU's allocator where there is one, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    try:
        # Of this program alone: what `getrusage` says includes the process that started it, up to that moment.
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
