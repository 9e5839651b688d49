"""Evaluations beside a training: one at a time, again after what may pass, and behind the training for the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import CheckpointError, DataUnavailable, FinrayError, ModelError, StorageError
from finray.records import Note
from finray.runtime.evaluator import LOST_S, PAUSE_S, TRIES, RayEvaluator, _evaluated, step_back
from finray.training import assemble
from finray.training.evaluator import CheckpointScores
from finray.training.pulse import Pulse


class Tasks:
    """In Ray's place: each task ends with what is next for its step."""

    def __init__(self, ends: dict[int, Sequence[Any]]) -> None:
        self.ends = {step: list(some) for step, some in ends.items()}
        self.begun: list[tuple[int, Path | None]] = []
        self.said: list[str] = []
        self.cancelled: list[int] = []
        self.is_ended = True
        self.now = 0.0

    def evaluator(self) -> RayEvaluator:
        return RayEvaluator(
            self.begin,
            ended=lambda running: self.is_ended,
            fetch=self.fetch,
            cancel=self.cancelled.append,
            notify=lambda note: self.said.append(note.message if isinstance(note, Note) else ""),
            clock=lambda: self.now,
        )

    def begin(self, step: int, checkpoint: Path | None) -> int:
        self.begun.append((step, checkpoint))
        return step

    def fetch(self, step: int) -> CheckpointScores:
        end = self.ends[step].pop(0)
        if isinstance(end, Exception):
            raise end
        return CheckpointScores(step, {"eval_loss": end})


def failed(error: Exception) -> Exception:
    """As Ray hands over an error of a task."""
    from ray.exceptions import RayTaskError

    return RayTaskError("_evaluate", "Traceback of it", error)


@pytest.mark.parametrize("is_closed", [False, True])
def test_one_runs_at_a_time_in_the_order_of_submission(is_closed: bool) -> None:
    tasks = Tasks({3: [1.0], 6: [2.0], 9: [3.0]})
    evaluator = tasks.evaluator()
    tasks.is_ended = False
    for step in (3, 6, 9):
        evaluator.submit(step, Path(f"checkpoint-{step}"))
    assert evaluator.results() == []
    assert tasks.begun == [(3, Path("checkpoint-3"))]
    if is_closed:
        # What runs is cancelled at the end.
        evaluator.close()
    tasks.is_ended = True
    steps = [] if is_closed else [3, 6, 9]
    assert [evaluated.step for evaluated in evaluator.results()] == steps
    evaluator.close()
    assert tasks.cancelled == ([3] if is_closed else [])


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("passes", [True, False])
def test_what_may_pass_is_tried_again_before_the_next(wrapped: bool, passes: bool) -> None:
    cause = OSError("Too many open files")
    error = failed(cause) if wrapped else cause
    tasks = Tasks({3: [error] * (TRIES - 1) + [1.0 if passes else error], 6: [2.0]})
    evaluator = tasks.evaluator()
    evaluator.submit(3, Path("checkpoint-3"))
    evaluator.submit(6, Path("checkpoint-6"))
    first = CheckpointScores(3, {"eval_loss": 1.0})
    if not passes:
        first = CheckpointScores(3, failure=f"OSError: Too many open files; it was tried {TRIES} times")
    assert evaluator.results() == [first, CheckpointScores(6, {"eval_loss": 2.0})]
    assert tasks.begun == [(3, Path("checkpoint-3"))] * TRIES + [(6, Path("checkpoint-6"))]
    assert tasks.said == ["restarting the evaluation of step 3: OSError: Too many open files"] * (TRIES - 1)


OUTAGES = [StorageError("the storage gave no answer", where="s3://b/r"), DataUnavailable("no answer", where="s3://b/d")]


LOST = RuntimeError("The worker died unexpectedly while executing this task.")
PAUSES: list[tuple[Exception, float]] = [*((outage, PAUSE_S) for outage in OUTAGES), (LOST, LOST_S)]


@pytest.mark.parametrize(("cause", "pause"), PAUSES)
@pytest.mark.parametrize("passes", [True, False])
def test_storage_that_is_away_and_a_lost_process_are_tried_again_after_a_pause(
    cause: Exception, pause: float, passes: bool
) -> None:
    error = cause if cause is LOST else failed(cause)
    tasks = Tasks({3: [error] * (TRIES - 1) + [1.0 if passes else error], 6: [2.0]})
    evaluator = tasks.evaluator()
    evaluator.submit(3, Path("checkpoint-3"))
    evaluator.submit(6, Path("checkpoint-6"))
    found = evaluator.results()
    for begun in range(1, TRIES):
        assert found == evaluator.results() == []
        assert [step for step, _ in tasks.begun] == [3] * begun
        tasks.now += pause - 1
        assert evaluator.results() == []
        assert [step for step, _ in tasks.begun] == [3] * begun
        tasks.now += 1
        found = evaluator.results()
    assert [one.step for one in found] == [3, 6]
    assert found[0].metrics == ({"eval_loss": 1.0} if passes else {})
    assert found[0].failure.endswith("" if passes else f"; it was tried {TRIES} times")
    assert bool(found[0].failure) is not passes
    assert found[1].metrics == {"eval_loss": 2.0}


@pytest.mark.parametrize("error", [*OUTAGES, CheckpointError("is damaged"), ModelError("cannot be loaded")])
def test_a_task_hands_over_only_storage_that_is_away_as_an_error(
    error: FinrayError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def evaluated(*given: Any, **named: Any) -> CheckpointScores:
        raise error

    monkeypatch.setattr(assemble, "evaluate_checkpoint", evaluated)
    run = {"name": "r", "output_dir": str(tmp_path)}
    spec: Any = SimpleNamespace(config={"model": {"name": "m"}, "data": {"source": "d"}, "run": run}, threads=1)
    known: Any = SimpleNamespace(resolved=SimpleNamespace(use_gpu=False, precision="fp32"))
    if error in OUTAGES:
        with pytest.raises(type(error)):
            _evaluated(spec, known, 3, None, Pulse())
    else:
        assert _evaluated(spec, known, 3, None, Pulse()) == CheckpointScores(3, failure=str(error))


def test_a_process_that_evaluates_stands_back_once() -> None:
    before = os.nice(0)
    child = os.fork()
    if not child:
        step_back()
        step_back()
        os._exit(os.nice(0) - before)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == min(5, 19 - before)
    assert os.nice(0) == before, "and not its parent"
