"""The loop: bookkeeping around the step. It knows nothing of Ray, of tasks, or of strategies by name."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from finray.config.evaluation import EvaluationConfig
from finray.config.schema import CheckpointConfig, Config
from finray.errors import TrainingError
from finray.parallel.base import NamedOptimizer, Strategy
from finray.records import EvalRecord, Note, RunSummary, TrainRecord
from finray.tracking.base import Trackers
from finray.training.checkpointing import CheckpointWriter, Snapshot, take_snapshot
from finray.training.evaluator import MOST_OUT, Evaluated, Evaluator
from finray.training.loader import EvalLoader, Prefetcher, StepData, StepLoader
from finray.training.memory import MemoryWriter
from finray.training.nonfinite import NonFiniteGuard
from finray.training.profile import Profiler
from finray.training.pulse import Pulse
from finray.training.schedule import learning_rate, passes_multiple
from finray.training.state import TrainState
from finray.training.step import ASKED, CAME, StepResult, evaluate, train_step
from finray.training.task import Task

# How long evaluations are waited for in silence, and between two looks at them.
_PATIENCE_S, _PAUSE_S = 10.0, 0.1


@dataclass
class Loop:
    """One rank's part of a run.

    Attributes:
        evaluation: the evaluation rows, or None when nothing is held out.
        trackers: where metrics go; on other ranks than the first, nowhere.
        save_extras: writes what else belongs in a checkpoint (tokenizer, template).
        reported: called on every rank after each checkpoint, with its directory and metrics.
        precision: dtype of the forward and backward pass.
        clock: seconds, monotonic.
        phases: seconds by phase.
        answered: metrics of answers to held-out prompts, beside those of the task; a collective. None where none are
            asked for.
        evaluator: with ``evaluation.mode: async`` on rank 0, what evaluates checkpoints on other resources.
        come: what came of evaluations that were out at the checkpoint that the run goes on from, where that is known
            already; the same on every rank.
        pause: sleeps so many seconds, on rank 0, while evaluations are waited for.
        asked: whether this rank has been asked for something; the ranks do it together where rank 0 has.
        wish: what rank 0 was asked for: ``stop`` and ``resize`` save a checkpoint and end, ``save`` saves one.
        last_metrics: of the evaluation after this step, if there was one.
        memory: keeps checkpoints in memory, between those on storage.
        stopped: it ended before its time, with a checkpoint, because that was asked for.
        ended_by: the wish that ended it.
        pulse: where this rank stands.
    """

    config: Config
    task: Task
    strategy: Strategy
    optimizer: NamedOptimizer
    loader: StepLoader
    evaluation: EvalLoader | None
    total_steps: int
    state: TrainState
    writer: CheckpointWriter
    trackers: Trackers
    save_extras: Callable[[Path], None]
    reported: Callable[[Path, dict[str, float]], None]
    precision: str
    clock: Callable[[], float]
    profiler: Profiler
    answered: Callable[[], dict[str, float]] | None = None
    evaluator: Evaluator | None = None
    come: Sequence[Evaluated] = ()
    pause: Callable[[float], None] = time.sleep
    asked: Callable[[], bool] = lambda: False
    wish: Callable[[], str] = lambda: "stop"
    phases: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0, "data_wait": 0.0}
    )
    last_metrics: dict[str, float] = field(default_factory=dict)
    first_loss: float | None = None
    first_step: int = 1
    final_loss: float | None = None
    stopped: bool = False
    ended_by: str = ""
    memory: MemoryWriter | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def __post_init__(self) -> None:
        self._window = _Window()
        self._said = _Said()
        self._waiting: list[Evaluated] = []
        self._best = self.task.spec.chosen(self.config.evaluation)
        if self.state.metric not in ("", self._best[0]):
            message = f"{self._best[0]} chooses the best checkpoint from now on, and no longer {self.state.metric}"
            self.trackers.log(Note(f"{message}; its best value is looked for anew", self.state.step))
            self.state.best, self.state.stale_evaluations = None, 0
        self.state.metric = self._best[0]
        self._guard = NonFiniteGuard(self.state, self.strategy.device, scaled=self.precision == "fp16")
        # Reused by every snapshot: fresh memory costs more than copying.
        self._copies: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Train from where the state stands to the end.

        Raises:
            FinrayError: on every rank alike.
        """
        config, state = self.config, self.state
        try:
            self._count(self.come, is_logged=True)
            if not self._is_over():
                if self.evaluation is not None and config.evaluation.on_start and state.step == 0:
                    self._begin_evaluation(self.evaluation)
                self._train()
            self._wait_for_evaluations(0)
        finally:
            self.writer.close()
            if self.memory is not None:
                self.memory.close()
            if self.evaluator is not None:
                self.evaluator.close()

    def _train(self) -> None:
        config, state = self.config, self.state
        self.task.model.train()
        self.first_step = state.step + 1
        data_ahead = Prefetcher(self.loader.at, state.position, clock=self.clock)
        # Numbers are read from the device at these intervals; between such steps nothing waits for it.
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
                rate = learning_rate(config.train, update=state.updates, total=self.total_steps)
                result = train_step(
                    self.task,
                    self.strategy,
                    self.optimizer,
                    data,
                    state,
                    self._guard,
                    learning_rate=rate,
                    max_grad_norm=config.train.max_grad_norm,
                    say=float(self.writer.is_done) + ASKED * self.asked() + CAME * self._has_results(),
                    parts=self.profiler.parts,
                    pulse=self.pulse,
                )
                self.pulse.ends()
                state.advance(items=data.items, tokens=data.tokens, supervised=data.supervised)
                self._window.add(data, result, waited)
                numbers = None
                said = self._said.read(result.said)
                asked, came = said % CAME >= ASKED, said >= CAME
                # A checkpoint that waits to be evaluated becomes one at once.
                came = came or (bool(state.evaluating) and round(said % ASKED) == self.strategy.world_size)
                due = state.step == self.total_steps or any(state.step % every == 0 for every in reading)
                due = due or any(self._is_due(one, data.items) for one in (config.checkpoint, config.evaluation))
                if asked or came or due:
                    numbers = self._window.read(result)
                    self._guard.raise_if_bad(state)
                    if self.first_loss is None:
                        self.first_loss = numbers.first_loss
                    self.final_loss = numbers.last_loss
                seconds = self.clock() - started
                state.seconds += seconds
                self._window.seconds += seconds
                self.phases["train"] += seconds
                self.phases["data_wait"] += waited
                self.profiler.after(state.step)
                if numbers is not None:
                    self._after_step(data, rate, numbers, asked=asked, came=came)
        finally:
            data_ahead.close()
            self.profiler.close()

    def _is_over(self) -> bool:
        return self.stopped or self.state.step >= self.total_steps or self._has_stopped()

    def _has_stopped(self) -> bool:
        """Whether evaluations have brought no gain for so long that the run ends here."""
        stopping = self.config.evaluation.early_stopping
        return stopping is not None and self.state.stale_evaluations >= stopping.patience

    def _is_due(self, section: CheckpointConfig | EvaluationConfig, items: int) -> bool:
        """Whether a checkpoint or an evaluation is due after this step, of so many items."""
        if section.every_epochs is None:
            return section.every_steps is not None and self.state.step % section.every_steps == 0
        every, position = section.every_epochs * len(self.loader.plan), self.state.position
        return passes_multiple(position - items, position, every)

    def _after_step(self, data: StepData, rate: float, numbers: _Numbers, *, asked: bool, came: bool) -> None:
        """Log, evaluate and save, each where it is due; where the run is stopped, log what is left and save."""
        config, state = self.config, self.state
        wish = self.strategy.broadcast_object(self.wish()) if asked else ""
        if came:
            self._count(self._fetch())
        if round(numbers.said % ASKED) == self.strategy.world_size:
            self._finish_saving()
        last = state.step == self.total_steps
        if last or state.step % config.tracking.log_every == 0:
            self._log_step(data, rate, numbers)
        self.last_metrics, is_wanted = {}, False
        if self.evaluation is not None and (last or self._is_due(config.evaluation, data.items)):
            self.last_metrics = self._begin_evaluation(self.evaluation)
            # What is evaluated beside the training is a checkpoint.
            is_wanted = self._is_best(self.last_metrics) and config.checkpoint.keep_best if self.last_metrics else True
        if self._has_stopped() and not last:
            last = True
            if self._window.tokens:
                self._log_step(data, rate, numbers)
            metric, _ = self._best
            rule = config.evaluation.early_stopping
            gain = f" by more than {rule.min_gain:g}" if rule is not None and rule.min_gain else ""
            message = (
                f"stopped early at step {state.step} of {self.total_steps}: {metric} has not improved{gain} in "
                f"{state.stale_evaluations} evaluations (evaluation.early_stopping); its best value is {state.best:.4f}"
            )
            self.trackers.log(Note(message, state.step))
        if wish not in ("", "save"):
            self.ended_by = wish
        self.stopped = (bool(self.ended_by) or self.stopped) and not last
        if self.stopped and self._window.tokens:
            self._log_step(data, rate, numbers)
        due = self._is_due(config.checkpoint, data.items) or is_wanted or wish == "save"
        is_stored = last or due or self.stopped
        behind = is_stored and config.checkpoint.asynchronous and not (last or self.stopped or wish == "save")
        # What is stored behind the training may be lost on its way.
        if self.memory is not None and (behind or not is_stored) and state.step % self.memory.interval == 0:
            started = self.clock()
            self.memory.ready()
            self.memory.begin(self._snapshot(self.memory.buffers), state.step)
            self.phases["checkpoint"] += self.clock() - started
        if not is_stored:
            return
        started = self.clock()
        self._finish_saving()
        snapshot = self._snapshot(self._copies if behind else None)
        self.writer.begin(snapshot, step=state.step, metrics=self.last_metrics)
        if not behind:
            self._finish_saving()
        self.phases["checkpoint"] += self.clock() - started

    def _snapshot(self, buffers: dict[str, torch.Tensor] | None) -> Snapshot:
        """What a checkpoint of now holds of this rank; a collective."""
        return take_snapshot(
            self.task.layout, self.optimizer, self.state, self.strategy, others=self.save_extras, buffers=buffers
        )

    def _log_step(self, data: StepData, rate: float, numbers: _Numbers) -> None:
        window, self._window = self._window, _Window()
        scaled = self.state.loss_scale is not None
        self.trackers.log(
            TrainRecord(
                step=self.state.step,
                epoch=round(self.state.position / len(self.loader.plan), 6),
                loss=numbers.loss,
                # Only fp16 goes on without one; it skips the update.
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
            )
        )

    def _begin_evaluation(self, loader: EvalLoader) -> dict[str, float]:
        """Evaluate and return the metrics; or, beside the training, have it done, and return none."""
        step = self.state.step
        if self.config.evaluation.mode == "inline":
            return self._evaluate(loader)
        self._wait_for_evaluations(MOST_OUT - 1)
        self.state.evaluating.append(step)
        if not step and self.evaluator is not None:
            self.evaluator.submit(0, None)
        return {}

    def _has_results(self) -> bool:
        if self.evaluator is not None:
            self._waiting += self.evaluator.results()
        return bool(self._waiting)

    def _fetch(self) -> list[Evaluated]:
        """What has come on rank 0; a collective."""
        self._has_results()
        come, self._waiting = self._waiting, []
        found: list[Evaluated] = self.strategy.broadcast_object(come)
        return found

    def _wait_for_evaluations(self, most: int) -> None:
        """Wait until at most so many are out, or the run is asked to stop; a collective."""
        if len(self.state.evaluating) <= most or self.stopped:
            return
        # Of a checkpoint that is not one yet there is none.
        self._finish_saving()
        started, said = self.clock(), False
        while len(self.state.evaluating) > most and not self.stopped:
            self._count(self._fetch())
            wish = self.strategy.broadcast_object(self.wish() if self.asked() else "")
            if wish not in ("", "save"):
                self.stopped, self.ended_by = True, wish
            elif len(self.state.evaluating) > most and self.strategy.rank == 0:
                if not said and self.clock() - started > _PATIENCE_S:
                    steps = ", ".join(map(str, self.state.evaluating))
                    what = f"the training waits for evaluations that are behind it (of step {steps}); "
                    what += "evaluation.every_steps is small for what an evaluation takes"
                    self.trackers.log(
                        Note(what if most else f"waiting for the evaluation of step {steps}", self.state.step)
                    )
                    said = True
                self.pause(_PAUSE_S)
        self.phases["evaluate"] += self.clock() - started

    def _count(self, results: Sequence[Evaluated], *, is_logged: bool = False) -> None:
        """Log what came of evaluations beside the training, and count it; the same on every rank.

        The record comes first: a run that goes on counts what is in ``metrics.jsonl``, and has the rest done once more.
        """
        for one in results:
            self.state.evaluating.remove(one.step)
            value = one.metrics.get(self._best[0], math.nan)
            if one.failure or not math.isfinite(value):
                why = one.failure or f"{self._best[0]} is {value}"
                message = f"step {one.step} has no evaluation, and is not chosen as the best: {why}"
                self.trackers.log(Note(message, self.state.step, "warning"))
                continue
            if not is_logged:
                self.trackers.log(EvalRecord(one.step, one.metrics, one.targets, one.seconds, one.confusion))
            if one.step:
                self.writer.add_metrics(one.step, one.metrics)
                self._is_best(one.metrics)

    def _evaluate(self, loader: EvalLoader) -> dict[str, float]:
        """Evaluate and log; returns the metrics."""
        started = self.clock()
        self.task.model.eval()
        metrics, confusion = evaluate(self.task, self.strategy, loader)
        if self.answered is not None:
            metrics |= self.answered()
        self.task.model.train()
        metric, _ = self._best
        if metric not in metrics:
            raise TrainingError(
                f"the evaluation has no metric `{metric}`",
                where="evaluation.metric",
                repair=f"use one of: {', '.join(metrics)}",
            )
        if not math.isfinite(metrics[metric]):
            # No checkpoint could be called better or worse than another by it.
            learned = ", or lower train.learning_rate; the last checkpoint is good" if self.state.step else ""
            raise TrainingError(
                f"{metric} is {metrics[metric]} at step {self.state.step}",
                repair=f"look at the held-out rows{learned}",
            )
        seconds = self.clock() - started
        self.phases["evaluate"] += seconds
        self.trackers.log(EvalRecord(self.state.step, metrics, loader.weight, round(seconds, 6), confusion))
        return metrics

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Count an evaluation; returns whether the metric that chooses is the best so far."""
        metric, mode = self._best
        stopping = self.config.evaluation.early_stopping
        min_gain = 0.0 if stopping is None else stopping.min_gain
        return self.state.evaluated(metrics[metric], mode, min_gain=min_gain)

    def _finish_saving(self) -> None:
        """Make what was written behind the training a checkpoint, and tell Ray."""
        saved = self.writer.finish()
        if saved is not None:
            if self.evaluator is not None and saved.step in self.state.evaluating:
                self.evaluator.submit(saved.step, saved.path)
            self.reported(saved.path, {"step": float(saved.step), **saved.metrics})

    def summary(self) -> RunSummary:
        """What the finished run says of itself; a collective."""
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
            best_metric=self._best[0],
            best=state.best,
            phases=self.phases,
            peak_memory_bytes=tuple(self.strategy.all_gather_object(peak_memory(self.strategy.device))),
        )


class _Numbers(NamedTuple):
    """What was read from the device: of the window, and of its first and last step."""

    loss: float
    first_loss: float
    last_loss: float
    grad_norm: float
    said: float


@dataclass
class _Window:
    """Means and sums since the last record; the loss stays on the device."""

    loss: torch.Tensor | None = None
    first_loss: torch.Tensor | None = None
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
        else:
            # A running mean: for a window of one step it is that step's loss to the last bit.
            self.loss = self.loss + (result.loss - self.loss) * (data.weight / self.weight)
        self.tokens += data.tokens
        self.waited += waited
        self.samples.extend(data.samples)

    def read(self, result: StepResult) -> _Numbers:
        assert self.loss is not None
        assert self.first_loss is not None
        values = [self.loss, self.first_loss, result.loss, result.grad_norm.double(), result.said]
        return _Numbers(*torch.stack(values).tolist())


class _Said:
    """Reads what the ranks said in a step: on a GPU in the step before, so that the device always has work to do."""

    def __init__(self) -> None:
        self._before: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, said: torch.Tensor) -> float:
        """The newest sum that can be read without waiting for the step that has just begun; the same on every rank."""
        if said.device.type != "cuda":
            # A CPU has it already; `item()` is for devices that must be waited for, which tests count.
            return float(said.numpy())
        before, event = self._before, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._before = said.to("cpu", non_blocking=True), event
        event.record()
        if before is None:
            return 0.0
        before[1].synchronize()
        return float(before[0])


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: the GPU's allocator where there is one, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    # Of this program alone: what `getrusage` says includes the process that started it, up to that moment.
    if status.is_file() and (found := re.search(r"VmHWM:\s*(\d+)", status.read_text(encoding="utf-8"))):
        return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
