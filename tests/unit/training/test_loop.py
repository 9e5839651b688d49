"""When the loop logs, evaluates and saves, and the numbers of its records: worked out here from a list of losses."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.errors import CheckpointError, TrainingError
from finray.records import EvalRecord, Note, TrainRecord
from finray.training import loop as module
from finray.training.evaluator import CheckpointScores
from finray.training.loop import decide_saving, peak_memory
from finray.training.pulse import Pulse
from finray.training.state import TrainState
from finray.training.step import Signals
from tests.support.made_up_run import CPU, LOSSES, WEIGHTS, Make, Run


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **options: Run(monkeypatch, **options)


@pytest.mark.parametrize("every", [1, 3, 4, 20])
def test_records_are_means_by_weight_and_sums_since_the_one_before(make: Make, every: int) -> None:
    made = make(tracking={"log_every": every, "record_samples": every != 4})
    found = made.run().of(TrainRecord)
    ends = sorted({*range(every, 11, every), 10})
    assert [record.step for record in found] == ends
    for start, record in zip([0, *ends], found, strict=False):
        window = slice(start, record.step)
        weights = WEIGHTS[window]
        mean = sum(a * b for a, b in zip(LOSSES[window], weights, strict=True)) / sum(weights)
        assert record.loss == pytest.approx(mean, rel=1e-12)
        if record.step - start == 1:
            assert record.loss == LOSSES[start]
        # The gradient of the last step.
        assert record.grad_norm == pytest.approx(LOSSES[record.step - 1])
        tokens = [100 * (step + 1) for step in range(10)]
        assert (record.tokens, record.supervised) == (sum(tokens[: record.step]), sum(weights) + len(weights))
        assert record.tokens_per_s == sum(tokens[window]) / (2.0 * len(weights))
        assert (record.seconds, record.data_wait_s) == (2.0 * record.step, 0.0)
        assert (record.lr, record.peak_memory_bytes) == (0.5, 123)
        assert record.epoch == round(record.step * 3 / 7, 6)
        assert (record.loss_scale, record.skipped) == (None, None)
        samples = tuple(row for step in range(start, record.step) for row in (step, step + 50))
        assert record.samples == (None if every == 4 else samples)
    assert (made.loop.first_loss, made.loop.final_loss, made.loop.first_step) == (LOSSES[0], LOSSES[-1], 1)
    assert made.rates == [(0.5, 0.0)] * 10


def test_a_run_goes_on_where_its_state_stands(make: Make) -> None:
    state = TrainState(step=6, position=18, tokens=1000, seconds=50.0)
    made = make(state=state).run()
    assert [record.step for record in made.of(TrainRecord)] == [7, 8, 9, 10]
    assert [record.seconds for record in made.of(TrainRecord)] == [52.0, 54.0, 56.0, 58.0]
    assert made.of(TrainRecord)[0].tokens == 1700
    assert (made.loop.first_loss, made.loop.first_step) == (LOSSES[6], 7)
    over = make(state=TrainState(step=10, position=30))
    over.loop.run()
    assert (over.loop.summary().first_loss, over.loop.summary().first_step) == (None, 11)
    assert (over.said, over.saved) == (["closed"], [])


@pytest.mark.parametrize("every", [None, 3, 5])
@pytest.mark.parametrize("on_start", [True, False])
def test_evaluations_come_at_the_start_at_intervals_and_at_the_end(
    make: Make, every: int | None, on_start: bool
) -> None:
    due = [step for step in range(1, 11) if step == 10 or (every is not None and step % every == 0)]
    values = [9.0] * on_start + [8.0 - step / 10 for step in due]
    made = make(held_out=values, evaluation={"every_steps": every, "on_start": on_start}).run()
    steps = [0] * on_start + due
    assert [(record.step, record.metrics) for record in made.of(EvalRecord)] == [
        (step, {"eval_loss": value}) for step, value in zip(steps, values, strict=True)
    ]
    assert {(record.targets, record.seconds) for record in made.of(EvalRecord)} == {(77, 5.0)}
    assert made.held_out == []
    # Neither does the first one count as the best, nor does dropout continue in any.
    assert made.loop.state.best == values[-1]
    assert made.loop.state.stale_evaluations == 0
    assert made.modes == [mode for step in range(11) for mode in [True] * (step > 0) + [False] * (step in steps)]
    assert made.loop.phases["evaluate"] == 5.0 * len(values)
    assert made.loop.phases["train"] == 20.0
    # A continued run does not begin with one.
    again = make(held_out=[1.0], state=TrainState(step=9, position=27))
    assert [record.step for record in again.run().of(EvalRecord)] == [10]


def test_what_is_written_behind_becomes_a_checkpoint_at_the_next_step_that_reads_numbers(make: Make) -> None:
    for written, told_at in ((True, 5), (False, 8)):
        made = make(checkpoint={"every_steps": 4}, writes=written)
        at: list[int] = []
        made.loop.reported = lambda path, metrics, made=made, at=at: at.append(made.loop.state.step)  # type: ignore[misc]
        made.run()
        assert at[0] == told_at


def reads_of(made: Run) -> list[int]:
    """The steps after which numbers are read from the device: these wait for it, and the others do not."""
    steps: list[int] = []
    guard = made.loop._guard
    look = guard.raise_if_bad

    def counted(state: TrainState) -> None:
        steps.append(state.step)
        look(state)

    guard.raise_if_bad = counted  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("held_out", [True, False])
def test_a_device_is_waited_for_where_something_is_due_and_what_is_written_behind_is_a_checkpoint_by_then(
    make: Make, held_out: bool
) -> None:
    """Records at 5 and 10, checkpoints at 4 and 8, evaluations at 7 and 10."""
    evaluation = {"every_steps": 7, "on_start": False}
    options: Any = {"held_out": [3.0, 2.0], "evaluation": evaluation} if held_out else {}
    made = make(tracking={"log_every": 5}, checkpoint={"every_steps": 4, "keep_best": False}, **options)
    steps, at = reads_of(made), list[tuple[str, int]]()
    made.loop.reported = lambda path, metrics: at.append((str(path), made.loop.state.step))
    made.run()
    assert steps == ([4, 5, 7, 8, 10] if held_out else [4, 5, 8, 10])
    assert at == [("c4", 5), ("c8", 10), ("c10", 10)]


class Behind:
    """Evaluates checkpoints one at a time, so many seconds each, while the loop goes on."""

    def __init__(self, made: Run, seconds: float, values: dict[int, float], failed: dict[int, str]) -> None:
        self.made, self.seconds, self.values, self.failed = made, seconds, values, failed
        self.submitted: list[tuple[int, str | None]] = []
        self.out: list[tuple[float, int]] = []
        self.added: list[tuple[int, dict[str, float]]] = []
        self.pauses: list[float] = []
        self.is_closed = False
        made.loop.evaluator, made.loop.pause = self, self.pause
        made.loop.writer.add_metrics = lambda step, metrics: self.added.append((step, metrics))  # type: ignore[method-assign, assignment]

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.made.now += 1.0

    def submit(self, step: int, checkpoint: Path | None) -> None:
        self.submitted.append((step, None if checkpoint is None else str(checkpoint)))
        begins = max([self.made.now, *(at for at, _ in self.out)])
        self.out.append((begins + self.seconds, step))

    def results(self) -> list[CheckpointScores]:
        ready = [step for at, step in self.out if at <= self.made.now]
        self.out = [one for one in self.out if one[1] not in ready]
        return [
            CheckpointScores(step, failure=self.failed[step])
            if step in self.failed
            else CheckpointScores(step, {"eval_loss": self.values[step]}, 77, 5.0)
            for step in ready
        ]

    def close(self) -> None:
        self.is_closed = True


ASYNC = {"mode": "async", "every_steps": 4, "on_start": True}
VALUES = {0: 1.0, 4: 8.0, 8: 8.5, 10: 7.0}


@pytest.mark.parametrize("keep_best", [True, False])
def test_checkpoints_are_evaluated_beside_the_training_and_the_last_is_waited_for(make: Make, keep_best: bool) -> None:
    made = make(held_out=[], evaluation=ASYNC, checkpoint={"keep_best": keep_best})
    behind = Behind(made, 3.0, VALUES, {})
    made.run()
    assert behind.submitted == [(0, None), (4, "c4"), (8, "c8"), (10, "c10")]
    assert [(record.step, record.metrics) for record in made.of(EvalRecord)] == [
        (step, {"eval_loss": value}) for step, value in VALUES.items()
    ]
    assert {(record.targets, record.seconds) for record in made.of(EvalRecord)} == {(77, 5.0)}
    # The model that training starts from is no checkpoint.
    assert behind.added == [(step, {"eval_loss": VALUES[step]}) for step in (4, 8, 10)]
    assert (made.loop.state.best, made.loop.state.stale_evaluations) == (7.0, 0)
    assert [step for step, metrics, _ in made.saved] == [4, 8, 10]
    assert made.loop.state.evaluating == []
    assert behind.pauses == [0.1] * 3
    assert made.loop.phases["evaluate"] == 3.0
    assert made.of(Note) == []
    assert behind.is_closed


def test_a_checkpoint_is_evaluated_from_the_next_step_on_and_its_result_counts_at_the_step_after_it_came(
    make: Make,
) -> None:
    """Steps take two seconds and snapshots three; the other steps do not wait for the device."""
    made = make(held_out=[], evaluation={**ASYNC, "on_start": False}, tracking={"log_every": 50})
    behind = Behind(made, 2.0, VALUES, {})
    steps, at = reads_of(made), list[tuple[str, int]]()
    submit, log = behind.submit, made.loop.trackers.log

    def submitted(step: int, checkpoint: Path | None) -> None:
        at.append((f"submitted {step}", made.loop.state.step))
        submit(step, checkpoint)

    def logged(record: Any) -> None:
        if isinstance(record, EvalRecord):
            at.append((f"evaluated {record.step}", made.loop.state.step))
        log(record)

    behind.submit, made.loop.trackers.log = submitted, logged  # type: ignore[method-assign]
    made.run()
    # The fifth step ends after 13 seconds, the evaluation after 15, which is when the seventh step begins.
    assert at == [
        *(("submitted 4", 5), ("evaluated 4", 7), ("submitted 8", 9), ("submitted 10", 10)),
        *(("evaluated 8", 10), ("evaluated 10", 10)),
    ]
    assert steps == [4, 5, 7, 8, 9, 10]


def test_only_checkpoints_of_the_steps_that_are_to_be_evaluated_are_evaluated(make: Make) -> None:
    made = make(held_out=[], evaluation={**ASYNC, "on_start": False}, checkpoint={"every_steps": 3})
    behind = Behind(made, 1.0, VALUES, {})
    made.run()
    assert [step for step, _, _ in made.saved] == [3, 4, 6, 8, 9, 10]
    assert behind.submitted == [(4, "c4"), (8, "c8"), (10, "c10")]


def test_a_rank_without_an_evaluator_counts_what_the_first_rank_tells(make: Make) -> None:
    made = make(steps=2, held_out=[], evaluation={**ASYNC, "every_steps": None})
    told: list[Any] = [
        [],
        "",
        [CheckpointScores(0, {"eval_loss": 1.0})],
        "",
        [CheckpointScores(2, {"eval_loss": 1.5}, 77, 5.0)],
        "",
    ]
    strategy, pauses = made.loop.strategy, list[float]()
    strategy.rank = 1
    strategy.broadcast_object = lambda own: told.pop(0)  # type: ignore[method-assign]
    made.loop.pause = pauses.append
    made.loop.writer.add_metrics = lambda step, metrics: made.said.append((step, metrics))  # type: ignore[method-assign]
    made.run()
    assert (made.loop.state.evaluating, made.loop.state.best) == ([], 1.5)
    assert (2, {"eval_loss": 1.5}) in made.said
    # The first rank pauses, and the others wait for what it tells.
    assert (told, pauses) == ([], [])


def test_training_waits_where_four_evaluations_are_out_and_says_so_once(make: Make) -> None:
    values = {step: 9.0 - step / 10 for step in range(11)}
    made = make(held_out=[], evaluation={**ASYNC, "every_steps": 1, "on_start": False})
    behind = Behind(made, 30.0, values, {})
    most: list[int] = []
    made.loop.reported = lambda path, metrics: most.append(len(made.loop.state.evaluating))
    made.run()
    assert [record.step for record in made.of(EvalRecord)] == list(range(1, 11))
    assert max(most) == 4
    notes = [note.message for note in made.of(Note)]
    assert notes[0] == (
        "training is waiting for evaluations that are behind (of step 1, 2, 3, 4); evaluation.every_steps is small for "
        "the time that an evaluation takes"
    )
    assert notes[-1] == "waiting for the evaluation of step 7, 8, 9, 10"
    # Once for every step that waits, and at the end.
    assert len(notes) == 6 + 1
    assert made.loop.phases["evaluate"] == len(behind.pauses)


def test_an_evaluation_that_failed_is_a_warning_and_chooses_nothing(make: Make) -> None:
    made = make(held_out=[], evaluation=ASYNC)
    behind = Behind(made, 3.0, {**VALUES, 10: math.nan}, {8: "no memory"})
    made.run()
    assert [record.step for record in made.of(EvalRecord)] == [0, 4]
    assert [step for step, _ in behind.added] == [4]
    assert [(note.message, note.level) for note in made.of(Note)] == [
        (f"step {step} has no evaluation and cannot be the best checkpoint: {why}", "warning")
        for step, why in ((8, "no memory"), (10, "eval_loss is nan"))
    ]
    assert made.loop.state.best == 8.0


def test_what_was_known_at_the_start_counts_and_is_not_written_again(make: Make) -> None:
    made = make(held_out=[], evaluation=ASYNC, state=TrainState(step=4, position=12, evaluating=[0, 4]))
    behind = Behind(made, 3.0, VALUES, {})
    made.loop.evaluated = [CheckpointScores(4, {"eval_loss": 0.5}), CheckpointScores(0, {"eval_loss": 0.1})]
    made.run()
    assert [record.step for record in made.of(EvalRecord)] == [8, 10]
    assert made.loop.state.best == 0.5
    assert behind.added[0] == (4, {"eval_loss": 0.5})


@pytest.mark.parametrize("request_", ["stop", "resize", "save"])
def test_a_run_that_is_asked_to_stop_does_not_wait_for_evaluations(make: Make, request_: str) -> None:
    made = make(held_out=[], evaluation={**ASYNC, "on_start": False}, stop_at=11)
    behind = Behind(made, 100.0, VALUES, {})
    made.loop.take_request = lambda: request_
    made.run()
    if request_ == "save":
        assert len(made.of(EvalRecord)) == 3
        assert (made.loop.stopped, made.loop.ended_by) == (False, "")
    else:
        assert made.of(EvalRecord) == []
        assert (made.loop.stopped, made.loop.ended_by) == (True, request_)
        assert made.loop.state.evaluating == [4, 8, 10]
        assert behind.pauses == []
    assert behind.is_closed


@pytest.mark.parametrize("comes", ["with the step", "while it waits"])
def test_a_request_to_save_does_not_wait_for_evaluations_that_are_behind(make: Make, comes: str) -> None:
    """The machine that goes has no time for them."""
    values = {step: 9.0 - step / 10 for step in range(11)}
    made = make(held_out=[], evaluation={**ASYNC, "every_steps": 1, "on_start": False})
    behind = Behind(made, 30.0, values, {})
    early = comes == "with the step"
    made.loop.has_request = lambda: made.loop.state.step == 4 if early else len(behind.pauses) == 3
    made.loop.take_request = lambda: behind.pauses.append(0.0) or "save"  # type: ignore[func-returns-value]
    known: dict[str, int] = {}
    made.loop.reported = lambda path, metrics: known.update({str(path): len(made.of(EvalRecord))})
    made.run()
    # Training waits for the first time after step 5; after step 6 it waits for two, and saves as usual again.
    assert [snapshot for _, _, snapshot in made.saved[3:6]] == ["4 behind", "5 at once", "6 behind"]
    assert (known["c5"], known["c6"]) == (0, 2)
    assert [record.step for record in made.of(EvalRecord)] == list(range(1, 11))
    assert (made.loop.stopped, made.loop.ended_by) == (False, "")


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_so_far_is_saved_where_it_is_kept(make: Make, keep_best: bool) -> None:
    values = [3.0, 4.0, 2.0, 2.0, 5.0]
    options = {"evaluation": {"every_steps": 2, "on_start": False}, "checkpoint": {"keep_best": keep_best}}
    made = make(held_out=values, **options).run()
    assert made.loop.state.stale_evaluations == 2, "equal is no gain"
    best = [(2, {"eval_loss": 3.0}), (6, {"eval_loss": 2.0})] if keep_best else []
    assert [(step, metrics) for step, metrics, _ in made.saved] == [*best, (10, {"eval_loss": 5.0})]
    assert made.reported[-1] == ("c10", {"step": 10.0, "eval_loss": 5.0})
    most = make(held_out=values, best=("accuracy", "max"), **options).run()
    assert [step for step, _, _ in most.saved] == ([2, 4, 10] if keep_best else [10])
    assert most.loop.summary().best == 5.0


@pytest.mark.parametrize(
    ("min_gain", "values", "stops", "gain"),
    [
        (0.0, [3.0, 2.0, 2.5, 2.0, 1.0], 8, ""),
        (0.5, [3.0, 2.8, 2.6, 2.0, 1.0], 6, " by more than 0.5"),
        # Two small gains are one that counts.
        (0.5, [3.0, 2.6, 2.4, 2.0, 1.0], None, ""),
        (0.0, [5.0, 4.0, 3.0, 2.0, 1.0], None, ""),
        # It would have ended there anyway.
        (0.0, [5.0, 4.0, 3.0, 3.0, 3.0], None, ""),
    ],
)
@pytest.mark.parametrize("log_every", [2, 5])
def test_a_run_without_gain_stops_with_a_checkpoint_and_says_why(
    make: Make, min_gain: float, values: list[float], stops: int | None, gain: str, log_every: int
) -> None:
    stopping = {"every_steps": 2, "on_start": False, "early_stopping": {"patience": 2, "min_gain": min_gain}}
    made = make(
        held_out=values, evaluation=stopping, tracking={"log_every": log_every}, checkpoint={"keep_best": False}
    )
    made.run()
    last = stops or 10
    assert made.loop.state.step == last
    assert not made.loop.stopped
    assert made.saved[-1][0] == last
    assert made.saved[-1][2].endswith("at once")
    # Also the steps since the record before, and nothing twice.
    assert [record.step for record in made.of(TrainRecord)] == sorted({*range(log_every, last, log_every), last})
    notes = made.of(Note)
    if stops is None:
        assert notes == []
        return
    assert made.said[-1] is notes[0], "after the record of that step"
    assert notes == [
        Note(
            f"stopped early at step {stops} of 10: eval_loss has not improved{gain} in 2 evaluations "
            f"(evaluation.early_stopping); its best value is {min(values[: stops // 2]):.4f}",
            stops,
        )
    ]
    # A new start does not begin again.
    again = make(held_out=[], evaluation=stopping, state=made.loop.state)
    again.loop.run()
    assert again.said == ["closed"]
    # With more patience it goes on.
    patient = {**stopping, "early_stopping": {"patience": 9, "min_gain": min_gain}}
    assert make(held_out=values, evaluation=patient, state=made.loop.state).run().loop.state.step == 10


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_that_is_asked_to_stop_saves_at_once_and_logs_what_is_left(make: Make, log_every: int) -> None:
    made = make(stop_at=6, tracking={"log_every": log_every}, held_out=[1.0], evaluation={"on_start": False}).run()
    assert made.loop.stopped
    assert made.loop.state.step == 6
    assert made.saved == [(6, {}, "6 at once")]
    assert made.reported == [("c6", {"step": 6.0})]
    steps = [record.step for record in made.of(TrainRecord)]
    assert steps == (list(range(1, 7)) if log_every == 1 else [4, 6])
    # At its last step it is at its end, and not stopped.
    over = make(stop_at=10, held_out=[1.0], evaluation={"on_start": False}).run()
    assert not over.loop.stopped
    assert [step for step, _, _ in over.saved] == [10]


@pytest.mark.parametrize(("step", "hint"), [(0, False), (4, True)])
def test_an_evaluation_that_is_not_finite_ends_the_run(make: Make, step: int, hint: bool) -> None:
    values = [math.nan] if step == 0 else [1.0, math.inf]
    made = make(held_out=values, evaluation={"every_steps": 4})
    with pytest.raises(TrainingError, match=rf"eval_loss is (nan|inf) at step {step}") as caught:
        made.loop.run()
    assert ("lower train.learning_rate" in str(caught.value.repair)) is hint
    assert made.saved == []


def test_the_summary_says_what_the_run_came_to(make: Make) -> None:
    made = make(held_out=[2.0, 1.5], evaluation={"every_steps": None}).run()
    found = made.loop.summary()
    tokens = sum(100 * (step + 1) for step in range(10))
    assert (found.step, found.total_steps, found.tokens, found.supervised) == (10, 10, tokens, sum(WEIGHTS) + 10)
    assert (found.train_seconds, found.tokens_per_s) == (20.0, tokens / 20.0)
    assert (found.first_loss, found.final_loss, found.first_step) == (LOSSES[0], LOSSES[-1], 1)
    assert (found.best_metric, found.best, found.peak_memory_bytes) == ("eval_loss", 1.5, (123,))
    assert found.phases == {"train": 20.0, "evaluate": 10.0, "checkpoint": 3.0, "data_wait": 0.0}
    assert make(state=TrainState(step=10)).loop.summary().tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("given", "asynchronous", "otherwise"),
    [
        # (storage, in memory, stopped) of a run whose checkpoints are written in the background, and of one that waits.
        ("", ("none", False, False), None),
        ("memory_due", ("none", True, False), None),
        ("is_due", ("background", False, False), ("wait", False, False)),
        ("is_due memory_due", ("background", True, False), ("wait", False, False)),
        ("save_requested memory_due", ("wait", False, False), None),
        ("save_requested is_due", ("wait", False, False), None),
        ("end_requested memory_due", ("wait", False, True), None),
        ("end_requested is_due", ("wait", False, True), None),
        ("is_last memory_due", ("wait", False, False), None),
        ("is_last end_requested is_due", ("wait", False, False), None),
        ("is_last save_requested", ("wait", False, False), None),
    ],
)
def test_what_is_saved_after_a_step(
    given: str, asynchronous: tuple[Any, ...], otherwise: tuple[Any, ...] | None
) -> None:
    names = ("is_last", "is_due", "save_requested", "end_requested", "memory_due")
    for background, expected in ((True, asynchronous), (False, otherwise or asynchronous)):
        options = {name: name in given.split() for name in names}
        found = decide_saving(**options, asynchronous=background)
        assert (found.storage, found.in_memory, found.is_stopped) == expected


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


def test_while_records_are_not_on_disk_nothing_is_kept_in_memory_and_the_end_of_the_run_is_an_error(make: Make) -> None:
    made = make(checkpoint={"every_steps": 4})
    kept = InMemory(made, 3)

    def refuse() -> None:
        raise CheckpointError("the run's records could not be written")

    made.trackers.is_behind, made.trackers.keep = True, refuse
    with pytest.raises(CheckpointError, match="records could not be written"):
        made.run()
    assert (kept.begun, made.loop.state.step, kept.is_closed) == ([], 10, True)


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


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_answers_add_their_metrics_and_what_is_done_can_be_read_meanwhile(make: Make) -> None:
    made = make(held_out=[2.0, 1.0], evaluation={"every_steps": 5, "on_start": False})
    pulse, seen = Pulse(lambda: made.now), list[Any]()
    made.loop.pulse = pulse
    score = made.loop.task.objective.score

    def looked(outputs: Any, batch: Any, sums: Any) -> None:
        seen.append((pulse.part, pulse.share))
        score(outputs, batch, sums)

    def answered(told: Any) -> dict[str, float]:
        assert not made.loop.task.model.training
        told(0.5)
        seen.append((pulse.part, pulse.share))
        made.now += 1.0
        return {"exact": 0.25}

    made.loop.task.objective.score = looked  # type: ignore[method-assign]
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


# --- what is read of the machine --------------------------------------------------------------------------------------


def test_the_peak_of_memory_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    def known() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    before = known()
    assert before <= peak_memory(CPU) <= known()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7.0)
    assert peak_memory(torch.device("cuda")) == 7
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5))
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    for system, expected in (("linux", 5 * 1024), ("darwin", 5)):
        monkeypatch.setattr("sys.platform", system)
        assert peak_memory(CPU) == expected


def test_on_a_gpu_what_the_ranks_said_is_read_one_step_later_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    class Event:
        count = 0

        def __init__(self) -> None:
            Event.count += 1
            self.number, self.recorded = Event.count, False

        def record(self) -> None:
            self.recorded = True

        def synchronize(self) -> None:
            assert self.recorded
            waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)

    def of_step(step: int) -> Any:
        def to(device: str, *, non_blocking: bool) -> torch.Tensor:
            assert (device, non_blocking) == ("cpu", True)
            return torch.tensor([step, 0, 2])

        return SimpleNamespace(device=torch.device("cuda"), to=to)

    reader = module._SignalReader()
    assert [reader.read(of_step(step)) for step in (1, 2, 3)] == [(0, 0, 0), (1, 0, 2), (2, 0, 2)]
    assert waited == [1, 2]
    assert module._SignalReader().read(torch.tensor([4, 0, 1])) == Signals(written=4, evaluated=1)
