"""The training loop: bookkeeping around the step. It does not depend on Ray, or on specific tasks or strategies."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from finray.config.evaluation import EvaluationConfig
from finray.config.resolved import Resolved
from finray.config.schema import CheckpointConfig, Config
from finray.config.tasks import Mode
from finray.errors import TrainingError
from finray.parallel.base import NamedOptimizer, Strategy, on_all_ranks
from finray.records import EvalRecord, Note, RunSummary, TrainRecord
from finray.tracking.base import Trackers
from finray.training.checkpointing import CheckpointWriter, Snapshot, take_snapshot
from finray.training.evaluator import MOST_OUT, CheckpointScores, Evaluator, OnProgress
from finray.training.loader import EvalLoader, Prefetcher, StepData, StepSource
from finray.training.memory import MemoryWriter
from finray.training.nonfinite import NonFiniteGuard
from finray.training.profile import Profiler
from finray.training.pulse import Pulse
from finray.training.schedule import learning_rate, passes_multiple
from finray.training.state import TrainState
from finray.training.step import Signals, StepResult, evaluate, train_step
from finray.training.task import Task

# How long to wait for evaluations before reporting it, and the polling interval.
_PATIENCE_S, _PAUSE_S = 10.0, 0.1


@dataclass(frozen=True, slots=True)
class Saving:
    """What is saved after a step.

    Attributes:
        storage: whether a checkpoint is written to storage, and whether training waits for it.
        in_memory: a checkpoint is kept in memory.
        is_stopped: the run ends here on request, before its last step.
    """

    storage: Literal["none", "background", "wait"]
    in_memory: bool
    is_stopped: bool


def decide_saving(
    *, is_last: bool, is_due: bool, save_requested: bool, end_requested: bool, asynchronous: bool, memory_due: bool
) -> Saving:
    """What to save after a step.

    Args:
        is_last: the run ends here anyway.
        is_due: a checkpoint is due, by its interval or for an evaluation.
        save_requested: a checkpoint was requested.
        end_requested: the end of the run was requested.
        asynchronous: ``checkpoint.asynchronous``.
        memory_due: a checkpoint in memory is due.
    """
    is_stopped = end_requested and not is_last
    storage: Literal["none", "background", "wait"] = "none"
    if is_last or is_stopped or save_requested:
        storage = "wait"
    elif is_due:
        storage = "background" if asynchronous else "wait"
    # A checkpoint written in the background may still fail.
    return Saving(storage, memory_due and storage != "wait", is_stopped)


@dataclass
class Loop:
    """One rank's part of a run.

    Attributes:
        evaluation: the evaluation rows, or None when nothing is held out.
        trackers: receive metrics; empty on ranks other than the first.
        save_extras: writes the other files of a checkpoint (tokenizer, template).
        reported: called on every rank after each checkpoint, with its directory and metrics.
        resolved: what the run decided.
        best_metric: the metric that chooses the best checkpoint and stops a run early; whether less or more is better.
        clock: seconds, monotonic.
        phases: seconds by phase.
        answered: metrics of answers to held-out prompts, in addition to those of the task; a collective. None if not
            configured.
        evaluator: on rank 0 with ``evaluation.mode: async``, evaluates checkpoints on other resources.
        evaluated: known results of evaluations that were pending at the checkpoint from which the run continues; the
            same on every rank.
        pause: sleeps for the given seconds, on rank 0, while waiting for evaluations.
        has_request: whether this rank has received a request; the ranks act on it together if rank 0 has.
        take_request: the request to rank 0: ``stop`` and ``resize`` save a checkpoint and end, ``save`` saves one.
        last_metrics: of the evaluation after this step, if any.
        memory: keeps checkpoints in memory, between those on storage.
        stopped: the run ended early, with a checkpoint, on request.
        ended_by: the request that ended it.
        pulse: progress of this rank.
    """

    config: Config
    task: Task
    strategy: Strategy
    optimizer: NamedOptimizer
    source: StepSource
    evaluation: EvalLoader | None
    total_steps: int
    state: TrainState
    writer: CheckpointWriter
    trackers: Trackers
    save_extras: Callable[[Path], None]
    reported: Callable[[Path, dict[str, float]], None]
    resolved: Resolved
    best_metric: tuple[str, Mode]
    clock: Callable[[], float]
    profiler: Profiler
    answered: Callable[[OnProgress], dict[str, float]] | None = None
    evaluator: Evaluator | None = None
    evaluated: Sequence[CheckpointScores] = ()
    pause: Callable[[float], None] = time.sleep
    has_request: Callable[[], bool] = lambda: False
    take_request: Callable[[], str] = lambda: "stop"
    phases: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0, "data_wait": 0.0}
    )
    last_metrics: dict[str, float] = field(default_factory=dict)
    first_loss: float | None = None
    first_step: int = field(init=False)
    final_loss: float | None = None
    stopped: bool = False
    ended_by: str = ""
    memory: MemoryWriter | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def __post_init__(self) -> None:
        self.first_step = self.state.step + 1
        self._window = _Window()
        self._signals = _SignalReader()
        self._waiting: list[CheckpointScores] = []
        self._is_save_requested = False
        (metric, mode), before = self.best_metric, (self.state.metric, self.state.metric_mode)
        message = ""
        if before[0] not in ("", metric):
            message = f"{metric} now chooses the best checkpoint, instead of {before[0]}"
        elif before[1] not in ("", mode):
            message = f"the best checkpoint now has the {'largest' if mode == 'max' else 'smallest'} {metric}"
        if message:
            self.trackers.log(Note(f"{message}; its best value starts over", self.state.step))
            self.state.best, self.state.counted, self.state.stale_evaluations = None, None, 0
        self.state.metric, self.state.metric_mode = self.best_metric
        self._guard = NonFiniteGuard(self.state, self.strategy.device, scaled=self.resolved.precision == "fp16")
        # Reused by every snapshot: allocating fresh memory costs more than copying.
        self._copies: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Train from the current state to the end. Raises FinrayError: on every rank."""
        config, state = self.config, self.state
        try:
            self._record_evaluations(self.evaluated, is_logged=True)
            if not self._is_over():
                if self.evaluation is not None and config.evaluation.on_start and state.step == 0:
                    self._begin_evaluation(self.evaluation)
                self._train()
            self._wait_for_evaluations(0)
            # Evaluations may have come after the last checkpoint.
            on_all_ranks(self.strategy, self.trackers.keep)
        finally:
            self.writer.close()
            if self.memory is not None:
                self.memory.close()
            if self.evaluator is not None:
                self.evaluator.close()

    def _train(self) -> None:
        config, state, peak = self.config, self.state, self.resolved.learning_rate
        self.task.model.train()
        source = self.source
        data_ahead = Prefetcher(source.at, state.position, is_ahead=source.is_ahead, clock=self.clock)
        # Numbers are read from the device at these intervals; other steps do not wait for it.
        reading = [config.tracking.log_every]
        if self.memory is not None:
            reading.append(self.memory.interval)
        try:
            while not self._is_over():
                started, waited = self.clock(), data_ahead.waited
                self.profiler.before(state.step + 1)
                self.pulse.begins(state.step + 1)
                with self.profiler.parts("data wait"):
                    data = data_ahead.take(last=state.step + 1 == self.total_steps)
                waited = data_ahead.waited - waited
                rate = learning_rate(config.train, peak, update=state.step, total=self.total_steps)
                result = train_step(
                    self.task,
                    self.strategy,
                    self.optimizer,
                    data,
                    state,
                    self._guard,
                    learning_rate=rate,
                    max_grad_norm=config.train.max_grad_norm,
                    signals=Signals(self.writer.is_done, self.has_request(), self._has_results()),
                    parts=self.profiler.parts,
                    pulse=self.pulse,
                )
                state.advance(items=data.items, tokens=data.tokens, supervised=data.supervised)
                self._window.add(data, result, waited)
                numbers = None
                signals = self._signals.read(result.signals)
                # A checkpoint with a pending evaluation is committed at once.
                is_written = bool(state.evaluating) and signals.written == self.strategy.world_size
                has_news = bool(signals.requested or signals.evaluated or is_written)
                due = state.step == self.total_steps or any(state.step % every == 0 for every in reading)
                due = due or any(self._is_due(part, data.items) for part in (config.checkpoint, config.evaluation))
                if has_news or due:
                    numbers = self._window.read(result)
                    self._guard.raise_if_bad(state)
                    if self.first_loss is None:
                        self.first_loss = numbers.first_loss
                    self.final_loss = numbers.last_loss
                # Reading from a device waits for its all-reduce, and so for the other ranks.
                self.pulse.ends()
                seconds = self.clock() - started
                state.seconds += seconds
                self._window.seconds += seconds
                self.phases["train"] += seconds
                self.phases["data_wait"] += waited
                self.profiler.after(state.step)
                if numbers is not None:
                    self._after_step(data, rate, numbers, signals)
        finally:
            data_ahead.close()
            self.profiler.close()

    def _is_over(self) -> bool:
        return self.stopped or self.state.step >= self.total_steps or self._has_stopped()

    def _has_stopped(self) -> bool:
        """Whether early stopping ends the run here."""
        stopping = self.config.evaluation.early_stopping
        return stopping is not None and self.state.stale_evaluations >= stopping.patience

    def _is_due(self, section: CheckpointConfig | EvaluationConfig, items: int) -> bool:
        """Whether a checkpoint or an evaluation is due after this step of ``items`` items."""
        if section.every_epochs is None:
            return section.every_steps is not None and self.state.step % section.every_steps == 0
        every, position = section.every_epochs * self.source.items_per_epoch, self.state.position
        return passes_multiple(position - items, position, every)

    def _after_step(self, data: StepData, rate: float, numbers: _Numbers, signals: Signals) -> None:
        """Log, evaluate and save, if due; if the run is stopped, log the rest and save."""
        config, state = self.config, self.state
        request = self.strategy.broadcast_object(self.take_request()) if signals.requested else ""
        # Waiting for evaluations may set it too.
        self._is_save_requested = request == "save"
        if signals.evaluated:
            self._record_evaluations(self._fetch_evaluations())
        if numbers.signals.written == self.strategy.world_size:
            self._finish_saving()
        is_last = state.step == self.total_steps
        if is_last or state.step % config.tracking.log_every == 0:
            self._log_step(data, rate, numbers)
        is_due = self._is_due(config.checkpoint, data.items)
        self.last_metrics = {}
        if self.evaluation is not None and (is_last or self._is_due(config.evaluation, data.items)):
            self.last_metrics = self._begin_evaluation(self.evaluation)
            # Asynchronous evaluations need a checkpoint.
            is_wanted = not self.last_metrics or (self._is_best(self.last_metrics) and config.checkpoint.keep_best)
            is_due = is_due or is_wanted
        if self._has_stopped() and not is_last:
            is_last = True
            self._log_step(data, rate, numbers)
            self._note_early_stopping()
        if request not in ("", "save"):
            self.ended_by = request
        saving = decide_saving(
            is_last=is_last,
            is_due=is_due,
            save_requested=self._is_save_requested,
            end_requested=bool(self.ended_by),
            asynchronous=config.checkpoint.asynchronous,
            memory_due=self.memory is not None and state.step % self.memory.interval == 0,
        )
        self.stopped = saving.is_stopped
        if saving.storage != "none" or saving.in_memory:
            # A run that continues from here begins with an empty window.
            self._log_step(data, rate, numbers)
            started = self.clock()
            if saving.in_memory and self.memory is not None and self.memory.ready(is_whole=not self.trackers.is_behind):
                self.memory.begin(self._snapshot(self.memory.buffers), state.step)
            if saving.storage != "none":
                self._save(in_background=saving.storage == "background")
            self.phases["checkpoint"] += self.clock() - started

    def _note_early_stopping(self) -> None:
        metric, _ = self.best_metric
        stopping = self.config.evaluation.early_stopping
        gain = f" by more than {stopping.min_gain:g}" if stopping is not None and stopping.min_gain else ""
        message = (
            f"stopped early at step {self.state.step} of {self.total_steps}: {metric} has not improved{gain} in "
            f"{self.state.stale_evaluations} evaluations (evaluation.early_stopping); its best value is "
            f"{self.state.best:.4f}"
        )
        self.trackers.log(Note(message, self.state.step))

    def _save(self, *, in_background: bool) -> None:
        self._finish_saving()
        snapshot = self._snapshot(self._copies if in_background else None)
        self.writer.begin(snapshot, step=self.state.step, metrics=self.last_metrics)
        if not in_background:
            self._finish_saving()

    def _snapshot(self, buffers: dict[str, torch.Tensor] | None) -> Snapshot:
        """This rank's part of a checkpoint of the current state. A collective."""
        return take_snapshot(
            self.task.layout, self.optimizer, self.state, self.strategy, others=self.save_extras, buffers=buffers
        )

    def _log_step(self, data: StepData, rate: float, numbers: _Numbers) -> None:
        """Log the steps since the last record, if there are any."""
        window = self._window
        if not window.tokens:
            return
        self._window = _Window()
        scaled = self.state.loss_scale is not None
        self.trackers.log(
            TrainRecord(
                step=self.state.step,
                epoch=round(self.state.position / self.source.items_per_epoch, 6),
                loss=numbers.loss,
                # Only fp16 continues with a non-finite norm; it skips the update.
                grad_norm=numbers.grad_norm if math.isfinite(numbers.grad_norm) else None,
                lr=rate,
                tokens=self.state.tokens,
                supervised=window.supervised,
                samples_digest=data.digest,
                tokens_per_s=round(window.tokens / max(window.seconds, 1e-9), 3),
                data_wait_s=round(window.waited, 6),
                peak_memory_bytes=peak_memory(self.strategy.device),
                seconds=round(self.state.seconds, 6),
                loss_scale=self.state.loss_scale,
                skipped=self.state.skipped if scaled else None,
                samples=tuple(window.samples) if self.config.tracking.record_samples else None,
                means=self.task.objective.recorded(numbers.sums, window.weight),
            )
        )

    def _begin_evaluation(self, loader: EvalLoader) -> dict[str, float]:
        """Evaluate and return the metrics; if asynchronous, submit the evaluation and return none."""
        step = self.state.step
        if self.config.evaluation.mode == "async":
            self._wait_for_evaluations(MOST_OUT - 1)
            self.state.evaluating.append(step)
            if not step and self.evaluator is not None:
                self.evaluator.submit(0, None)
            return {}
        started = self.clock()
        self.task.model.eval()
        metrics, confusion = evaluate(self.task, self.strategy, loader, partial(self.pulse.evaluates, "evaluating"))
        if self.answered is not None:
            metrics |= self.answered(partial(self.pulse.evaluates, "answering prompts"))
        self.pulse.evaluates("", 0.0)
        self.task.model.train()
        metric, _ = self.best_metric
        if metric not in metrics:
            raise TrainingError(
                f"the evaluation has no metric `{metric}`",
                where="evaluation.metric",
                repair=f"use one of: {', '.join(metrics)}",
            )
        if not math.isfinite(metrics[metric]):
            # No checkpoint could be ranked by it.
            learned = ", or lower train.learning_rate; the last checkpoint is good" if step else ""
            raise TrainingError(
                f"{metric} is {metrics[metric]} at step {step}",
                repair=f"look at the held-out rows{learned}",
            )
        seconds = self.clock() - started
        self.phases["evaluate"] += seconds
        self.trackers.log(EvalRecord(step, metrics, loader.weight, round(seconds, 6), confusion))
        return metrics

    def _has_results(self) -> bool:
        if self.evaluator is not None:
            self._waiting += self.evaluator.results()
        return bool(self._waiting)

    def _fetch_evaluations(self) -> list[CheckpointScores]:
        """Results that have arrived on rank 0. A collective."""
        self._has_results()
        results: list[CheckpointScores] = self.strategy.broadcast_object(self._waiting)
        self._waiting = []
        return results

    def _wait_for_evaluations(self, most: int) -> None:
        """Wait until at most ``most`` evaluations are pending, or the run is asked to stop. A collective.

        A request to save ends the wait too, except after the last step (``most`` is 0), when all is saved.
        """
        if len(self.state.evaluating) <= most or (most and self._is_save_requested):
            return
        # An unfinished checkpoint cannot be evaluated.
        self._finish_saving()
        started, is_reported = self.clock(), False
        while len(self.state.evaluating) > most and not self.stopped:
            self._record_evaluations(self._fetch_evaluations())
            request = self.strategy.broadcast_object(self.take_request() if self.has_request() else "")
            if request not in ("", "save"):
                self.stopped, self.ended_by = True, request
            elif request and most:
                self._is_save_requested = True
                break
            elif len(self.state.evaluating) > most and self.strategy.rank == 0:
                if not is_reported and self.clock() - started > _PATIENCE_S:
                    steps = ", ".join(map(str, self.state.evaluating))
                    message = f"waiting for the evaluation of step {steps}"
                    if most:
                        message = (
                            f"training is waiting for evaluations that are behind (of step {steps}); "
                            "evaluation.every_steps is small for the time that an evaluation takes"
                        )
                    self.trackers.log(Note(message, self.state.step))
                    is_reported = True
                self.pause(_PAUSE_S)
        self.phases["evaluate"] += self.clock() - started

    def _record_evaluations(self, results: Sequence[CheckpointScores], *, is_logged: bool = False) -> None:
        """Log results of evaluations during training, and count them; the same on every rank.

        The record comes first: a resumed run counts what is in ``metrics.jsonl``, and repeats the other evaluations.
        """
        for result in results:
            self.state.evaluating.remove(result.step)
            value = result.metrics.get(self.best_metric[0], math.nan)
            if result.failure or not math.isfinite(value):
                why = result.failure or f"{self.best_metric[0]} is {value}"
                message = f"step {result.step} has no evaluation and cannot be the best checkpoint: {why}"
                self.trackers.log(Note(message, self.state.step, "warning"))
                continue
            if not is_logged:
                self.trackers.log(
                    EvalRecord(result.step, result.metrics, result.targets, result.seconds, result.confusion)
                )
            if result.step:
                self.writer.add_metrics(result.step, result.metrics)
                self._is_best(result.metrics)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Count an evaluation; returns whether the selection metric is the best so far."""
        metric, mode = self.best_metric
        stopping = self.config.evaluation.early_stopping
        min_gain = 0.0 if stopping is None else stopping.min_gain
        return self.state.evaluated(metrics[metric], mode, min_gain=min_gain)

    def _finish_saving(self) -> None:
        """Commit the checkpoint that was written in the background, and report it to Ray."""
        saved = self.writer.finish()
        if saved is not None:
            if self.evaluator is not None and saved.step in self.state.evaluating:
                self.evaluator.submit(saved.step, saved.path)
            self.reported(saved.path, {"step": float(saved.step), **saved.metrics})

    def summary(self) -> RunSummary:
        """The summary of the finished run. A collective."""
        state = self.state
        return RunSummary(
            step=state.step,
            total_steps=self.total_steps,
            tokens=state.tokens,
            supervised=state.supervised,
            train_seconds=state.seconds,
            tokens_per_s=state.tokens / state.seconds if state.seconds else 0.0,
            first_loss=self.first_loss,
            first_step=self.first_step,
            final_loss=self.final_loss,
            best_metric=self.best_metric[0],
            best=state.best,
            phases=self.phases,
            peak_memory_bytes=tuple(self.strategy.all_gather_object(peak_memory(self.strategy.device))),
        )


class _Numbers(NamedTuple):
    """Numbers read from the device: of the window, and of its first and last step."""

    loss: float
    first_loss: float
    last_loss: float
    grad_norm: float
    signals: Signals
    sums: tuple[float, ...]


@dataclass
class _Window:
    """Means and sums since the last record; the loss and the named sums stay on the device."""

    loss: torch.Tensor | None = None
    first_loss: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    weight: float = 0.0
    supervised: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    samples: list[int] = field(default_factory=list)

    def add(self, data: StepData, result: StepResult, waited: float) -> None:
        self.weight += data.weight
        self.supervised += data.supervised
        if self.loss is None:
            self.loss = self.first_loss = result.loss
            self.sums = result.sums
        else:
            # A running mean: for a window of one step it equals that step's loss to the last bit.
            assert self.sums is not None
            self.loss = self.loss + (result.loss - self.loss) * (data.weight / self.weight)
            self.sums = self.sums + result.sums
        self.tokens += data.tokens
        self.waited += waited
        self.samples.extend(data.samples)

    def read(self, result: StepResult) -> _Numbers:
        assert self.loss is not None
        assert self.first_loss is not None
        assert self.sums is not None
        values = [self.loss, self.first_loss, result.loss, result.grad_norm.double(), *result.signals, *self.sums]
        loss, first_loss, last_loss, grad_norm, *others = torch.stack(values).tolist()
        count = len(result.signals)
        return _Numbers(loss, first_loss, last_loss, grad_norm, Signals(*others[:count]), tuple(others[count:]))


class _SignalReader:
    """Reads the signals of a step: on a GPU one step late, so that the device always has work queued."""

    def __init__(self) -> None:
        self._before: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, signals: torch.Tensor) -> Signals:
        """The newest signals that can be read without waiting for the current step; the same on every rank."""
        if signals.device.type != "cuda":
            # NumPy, because tests count the reads of tensors that must be waited for.
            return Signals(*signals.numpy().tolist())
        before, event = self._before, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._before = signals.to("cpu", non_blocking=True), event
        event.record()
        if before is None:
            return Signals()
        before[1].synchronize()
        return Signals(*before[0].tolist())


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: from the GPU's allocator, or resident memory without a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    # Of this program only: `getrusage` includes the parent process up to the fork.
    if status.is_file() and (match := re.search(r"VmHWM:\s*(\d+)", status.read_text(encoding="utf-8"))):
        return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
