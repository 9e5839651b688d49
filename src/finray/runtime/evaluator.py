"""Evaluates checkpoints during training as Ray tasks, one at a time; created and polled by rank 0.

We do not use Ray Train's ``ValidationConfig`` (Ray 2.60): it also starts a task for a checkpoint that is only reported,
its results stay in Ray's list of checkpoints, which finray does not rely on and no worker sees, and an evaluator that
is killed (``WorkerCrashedError``) ends the controller, and with it the run.

The worker owns its tasks: when it exits, Ray cancels them, and the next start submits them again.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.checkpoint.rundir import RunDir
from finray.config.environment import accept
from finray.config.load import build_config
from finray.config.resolved import PreparedRun
from finray.errors import DataUnavailable, FinrayError, StorageError
from finray.files import first_line
from finray.records import Note, Record
from finray.runtime import failures
from finray.runtime.heartbeat import beat
from finray.runtime.progress import Sender
from finray.runtime.pulses import EVALUATOR
from finray.runtime.spec import WorkerSpec
from finray.training.pulse import Pulse

if TYPE_CHECKING:
    from finray.training.evaluator import CheckpointScores

# How often a task is started whose process died, or that failed in a way that may pass: no file handle was left, or the
# memory of a GPU was in use, or storage did not answer. Such storage is given time first.
TRIES = 3
PAUSE_S = 30.0
# Until Ray knows that a process has died, it may give the next task to it.
LOST_S = 2.0


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    checkpoint: Path | None
    tries: int = 1
    # Not to be started before.
    after: float = -math.inf


class RayEvaluator:
    """See :class:`finray.training.evaluator.Evaluator`.

    Args:
        begin: starts the evaluation of a checkpoint of a step, and returns a reference to its result.
        ended: whether a reference's task has ended, without waiting.
        fetch: the result, or the error of its task.
        cancel: cancels a task.
        notify: called with a note when an evaluation is repeated.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        begin: Callable[[int, Path | None], Any],
        *,
        ended: Callable[[Any], bool],
        fetch: Callable[[Any], Any],
        cancel: Callable[[Any], None],
        notify: Callable[[Record], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin, self._ended, self._fetch, self._cancel, self._notify = begin, ended, fetch, cancel, notify
        self._clock = clock
        self._queue: deque[_Pending] = deque()
        self._running: tuple[_Pending, Any] | None = None

    @classmethod
    def of(
        cls, spec: WorkerSpec, resources: Mapping[str, float], prepared: PreparedRun, notify: Callable[[Record], None]
    ) -> RayEvaluator:
        """On resources of the connected cluster, next to those of this worker."""
        import ray

        task = ray.remote(_evaluate).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            # Ray itself would retry a task that runs out of memory forever.
            max_retries=0,
            # Not in the workers' placement group, which is full.
            scheduling_strategy="DEFAULT",
            name="finray evaluation",
        )
        return cls(
            lambda step, checkpoint: task.remote(spec, prepared, step, None if checkpoint is None else str(checkpoint)),
            ended=lambda running: bool(ray.wait([running], timeout=0)[0]),
            fetch=ray.get,
            cancel=lambda running: ray.cancel(running, force=True),
            notify=notify,
        )

    def submit(self, step: int, checkpoint: Path | None) -> None:
        """Queue the evaluation of a checkpoint; None means the model that training starts from."""
        self._queue.append(_Pending(step, checkpoint))
        self._go_on()

    def results(self) -> Sequence[CheckpointScores]:
        """Results since the last call, in the order of submission."""
        come = []
        self._go_on()
        while self._running is not None and self._ended(self._running[1]):
            (job, running), self._running = self._running, None
            if (scores := self._result(job, running)) is not None:
                come.append(scores)
            self._go_on()
        return come

    def close(self) -> None:
        """Cancel all pending evaluations."""
        if self._running is not None:
            self._cancel(self._running[1])
        self._queue.clear()
        self._running = None

    def _go_on(self) -> None:
        if self._running is None and self._queue and self._queue[0].after <= self._clock():
            job = self._queue.popleft()
            self._running = job, self._begin(job.step, job.checkpoint)

    def _result(self, job: _Pending, running: Any) -> CheckpointScores | None:
        """The result of a task; None if it is started again."""
        from ray.exceptions import RayTaskError

        from finray.training.evaluator import CheckpointScores

        after = -math.inf
        try:
            scores: CheckpointScores = self._fetch(running)
            return scores
        except RayTaskError as error:
            if isinstance(error.cause, StorageError | DataUnavailable):
                after = self._clock() + PAUSE_S
            why = failures.describe(error.cause) if isinstance(error.cause, Exception) else first_line(error)
        except Exception as error:
            # Ray has several errors for a killed process and a lost machine.
            lost = failures.lost_process(str(error))
            after = self._clock() + LOST_S if lost is not None else after
            why = lost[0] if lost is not None else failures.describe(error)
        if job.tries == TRIES:
            return CheckpointScores(job.step, failure=f"{why}; it was tried {TRIES} times")
        self._notify(Note(f"restarting the evaluation of step {job.step}: {why}", job.step))
        self._queue.appendleft(_Pending(job.step, job.checkpoint, job.tries + 1, after))
        return None


@cache
def step_back() -> None:
    """Give training priority for the CPU; only once, because a Ray process runs several tasks."""
    os.nice(5)


def _evaluate(spec: WorkerSpec, prepared: PreparedRun, step: int, checkpoint: str | None) -> CheckpointScores:
    """The Ray task. An error that a retry would hit again is returned as a result.

    It sends heartbeats, so that the driver ends it where it stands still; it is then repeated as a killed one.
    """
    accept(spec.secrets)
    step_back()
    pulse = Pulse()
    pulse.step = step
    with closing(Sender(spec.listener)) as sender:
        beat(sender, "", EVALUATOR, pulse, hang_s=spec.hang_s)
        return _evaluated(spec, prepared, step, checkpoint, pulse)


def _evaluated(
    spec: WorkerSpec, prepared: PreparedRun, step: int, checkpoint: str | None, pulse: Pulse
) -> CheckpointScores:
    import torch

    from finray.evaluation.during import TrainingAnswers
    from finray.training.assemble import evaluate_checkpoint
    from finray.training.evaluator import CheckpointScores

    torch.set_num_threads(spec.threads)
    config = build_config(spec.config, source="driver")
    device = torch.device("cuda" if prepared.resolved.use_gpu else "cpu")
    try:
        if checkpoint is not None and (run := RunDir.of(config)).url is not None:
            # This task may run on another machine than the one that wrote the checkpoint.
            store = run.store(patient=True)
            store.verify(step)
            checkpoint = str(store.path_of(step))
        return evaluate_checkpoint(
            config,
            prepared,
            step,
            None if checkpoint is None else Path(checkpoint),
            device=device,
            answering=TrainingAnswers(config, prepared.resolved.precision),
            on_progress=pulse.evaluates,
        )
    except (StorageError, DataUnavailable):
        raise
    except FinrayError as error:
        return CheckpointScores(step, failure=str(error))
