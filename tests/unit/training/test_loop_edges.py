"""What the loop does beside training: checkpoints in memory, parts of an epoch, waiting, and what others read of it."""

from __future__ import annotations

from typing import Any

import pytest

from finray.errors import CheckpointError, TrainingError
from finray.records import EvalRecord, Note, TrainRecord
from finray.training.pulse import Pulse
from finray.training.state import TrainState
from tests.support.made_up_run import Make, Run


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **options: Run(monkeypatch, **options)


# --- checkpoints in memory --------------------------------------------------------------------------------------------


class InMemory:
    """Keeps snapshots; storing one takes half a second of the next one's time."""

    def __init__(self, made: Run, interval: int) -> None:
        self.made, self.interval, self.buffers = made, interval, {"b": 1}
        self.begun: list[tuple[int, Any]] = []
        self.is_ready = self.is_closed = False
        made.loop.memory = self  # type: ignore[assignment]

    def ready(self, *, is_whole: bool) -> bool:
        self.made.now += 0.5
        self.is_ready = is_whole
        return is_whole

    def begin(self, snapshot: Any, step: int) -> None:
        assert self.is_ready
        self.is_ready = False
        self.begun.append((step, snapshot))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("interval", "asynchronous", "stop_at", "steps"),
    [
        (3, True, None, [3, 6, 9]),
        # What is written in the background may still fail; what was written at once is there.
        (2, True, None, [2, 4, 6, 8]),
        (2, False, None, [2, 6]),
        (3, True, 7, [3, 6]),
        (3, True, 6, [3]),
    ],
)
def test_between_checkpoints_on_storage_snapshots_are_kept_in_memory(
    make: Make, interval: int, asynchronous: bool, stop_at: int | None, steps: list[int]
) -> None:
    storage = {"every_steps": 4, "asynchronous": asynchronous}
    made = make(checkpoint=storage, tracking={"log_every": 50}, stop_at=stop_at)
    kept = InMemory(made, interval)
    made.run()
    last = stop_at or 10
    assert kept.begun == [(step, f"{step} behind") for step in steps]
    stored = [*range(4, last, 4), last]
    assert [step for step, _, _ in made.saved] == stored
    # A run that goes on from any of them has the records up to it.
    assert [record.step for record in made.of(TrainRecord)] == sorted({*steps, *stored})
    assert made.loop.phases["checkpoint"] == 3.5 * len(steps) + 3.0 * len(stored)
    assert kept.is_closed


def test_while_records_are_not_on_disk_nothing_is_kept_in_memory_and_the_end_of_the_run_is_an_error(make: Make) -> None:
    made = make(checkpoint={"every_steps": 4})
    kept = InMemory(made, 3)

    def refuse() -> None:
        raise CheckpointError("the run's records could not be written")

    made.trackers.is_behind, made.trackers.keep = True, refuse
    with pytest.raises(CheckpointError, match="records could not be written"):
        made.run()
    assert (kept.begun, made.loop.state.step, kept.is_closed) == ([], 10, True)


def test_a_request_to_save_is_stored_and_not_kept_in_memory(make: Make) -> None:
    made = make(stop_at=6)
    kept = InMemory(made, 3)
    made.loop.take_request = lambda: "save"
    made.run()
    assert [step for step, _ in kept.begun] == [3, 9]
    assert [(step, snapshot) for step, _, snapshot in made.saved] == [(6, "6 at once"), (10, "10 at once")]
    assert (made.loop.stopped, made.loop.ended_by, made.loop.state.step) == (False, "", 10)


# --- parts of an epoch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps"),
    # An epoch is seven items, and a step takes three.
    [(1.0, [3, 5, 7, 10]), (0.5, [2, 3, 4, 5, 6, 7, 9, 10]), (2.0, [5, 10]), (9.0, [10])],
)
def test_checkpoints_and_evaluations_come_with_the_step_that_ends_a_part_of_an_epoch(
    make: Make, every: float, steps: list[int]
) -> None:
    values = [20.0 + number for number in range(len(steps))]
    made = make(
        held_out=values,
        checkpoint={"every_epochs": every, "every_steps": 1, "keep_best": False},
        evaluation={"every_epochs": every, "on_start": False},
    ).run()
    assert [step for step, _, _ in made.saved] == steps
    assert [record.step for record in made.of(EvalRecord)] == steps


# --- time -------------------------------------------------------------------------------------------------------------


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_answers_add_their_metrics_and_what_is_done_can_be_read_meanwhile(make: Make) -> None:
    made = make(held_out=[2.0, 1.0], evaluation={"every_steps": 5, "on_start": False})
    pulse, seen = Pulse(lambda: made.now), list[Any]()
    made.loop.pulse = pulse
    score = made.loop.task.score

    def looked(batch: Any, sums: Any) -> None:
        seen.append((pulse.part, pulse.share))
        score(batch, sums)

    def answered(told: Any) -> dict[str, float]:
        assert not made.loop.task.model.training
        told(0.5)
        seen.append((pulse.part, pulse.share))
        made.now += 1.0
        return {"exact": 0.25}

    made.loop.task.score = looked  # type: ignore[method-assign]
    made.loop.answered = answered
    made.run()
    assert [record.metrics for record in made.of(EvalRecord)] == [
        {"eval_loss": value, "exact": 0.25} for value in (2.0, 1.0)
    ]
    assert seen == [("evaluating", 0.0), ("answering prompts", 0.5)] * 2
    assert (pulse.part, pulse.share) == ("", 0.0)
    assert made.loop.phases["evaluate"] == 2 * 6.0
    # After as many steps, of two seconds each, of which none were spent in an all-reduce.
    assert (pulse.step, pulse.steps, pulse.phase) == (10, 10, "other")
    assert (pulse.work_s, pulse.longest_s) == (20.0, 2.0)


def test_a_metric_that_no_evaluation_has_is_named_with_those_there_are(make: Make) -> None:
    made = make(held_out=[2.0])
    made.loop.best_metric = ("rouge", "max")
    with pytest.raises(TrainingError, match="the evaluation has no metric `rouge`") as caught:
        made.loop.run()
    assert (caught.value.where, caught.value.repair) == ("evaluation.metric", "use one of: eval_loss")


@pytest.mark.parametrize(
    ("metric", "mode", "said"),
    [
        *(("", "", ""), ("eval_loss", "", ""), ("eval_loss", "min", "")),
        ("accuracy", "max", "eval_loss now chooses the best checkpoint, instead of accuracy"),
        ("accuracy", "", "eval_loss now chooses the best checkpoint, instead of accuracy"),
        ("eval_loss", "max", "the best checkpoint now has the smallest eval_loss"),
    ],
)
def test_the_best_value_of_another_metric_or_direction_is_forgotten(
    make: Make, metric: str, mode: str, said: str
) -> None:
    known: dict[str, Any] = {"metric": metric, "metric_mode": mode, "best": 0.5, "stale_evaluations": 3}
    state = TrainState(step=9, position=27, **known)
    made = make(held_out=[1.0], state=state)
    assert made.said == ([Note(f"{said}; its best value starts over", 9)] if said else [])
    assert (state.metric, state.metric_mode) == ("eval_loss", "min")
    made.run()
    assert (state.best, state.stale_evaluations) == ((1.0, 0) if said else (0.5, 4))


# --- what is measured -------------------------------------------------------------------------------------------------
