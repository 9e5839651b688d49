"""What a run counts, and what of it a checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from finray.errors import CheckpointError
from finray.training.state import TrainState

LESS, MORE = [3.0, 2.0, 2.5, 1.95, 1.0], [0.1, 0.5, 0.4, 0.52, 0.9]


@pytest.mark.parametrize(("mode", "values"), [("min", LESS), ("max", MORE)])
def test_the_best_is_the_least_or_the_most_and_patience_counts_gains(
    mode: Literal["min", "max"], values: list[float]
) -> None:
    """The fourth is the best so far by less than what counts as a gain."""
    state = TrainState()
    seen = [(state.evaluated(value, mode, min_gain=0.1), state.best, state.stale_evaluations) for value in values]
    best = [values[0], values[1], values[1], values[3], values[4]]
    assert seen == list(zip([True, True, False, True, True], best, [0, 0, 1, 2, 0], strict=True))


def test_equal_is_no_gain() -> None:
    state = TrainState(best=2.0)
    assert not state.evaluated(2.0, "min", min_gain=0.0)
    assert state.stale_evaluations == 1


def test_all_that_is_counted_comes_back(tmp_path: Path) -> None:
    names = list(TrainState.__dataclass_fields__)
    others: dict[str, Any] = {
        "data": "digest",
        "reference": "files",
        "metric": "accuracy",
        "metric_mode": "max",
        "evaluating": [4, 8],
    }
    state = TrainState(**{name: others.get(name, number) for number, name in enumerate(names, 1)})
    (tmp_path / "training_state").mkdir()
    path = tmp_path / "training_state" / "state.json"
    path.write_text(state.text(), encoding="utf-8")
    assert TrainState.load(tmp_path) == state
    written = json.loads(path.read_text())
    # Earlier versions take the position in the schedule from it.
    assert list(written) == ["updates", *names]
    assert written["updates"] == state.step
    # A checkpoint of finray 0.1, and one that is none.
    written["best_eval_loss"] = written.pop("best")
    path.write_text(json.dumps(written), encoding="utf-8")
    assert TrainState.load(tmp_path) == state
    for content, said in (('{"step": "many"}', "step"), ('{"step": 1, "phase": 2}', "not known here: phase")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=said):
            TrainState.load(tmp_path)


def test_a_step_is_counted() -> None:
    state = TrainState(step=2, position=10, tokens=100, supervised=50, seconds=1.5)
    state.advance(items=4, tokens=30, supervised=20)
    assert state == TrainState(step=3, position=14, tokens=130, supervised=70, seconds=1.5)


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_small_gains_add_up_to_one_that_counts(mode: Literal["min", "max"], sign: int) -> None:
    """As in Keras and Lightning. Each is 0.009, and the smallest that counts 0.01."""
    state, seen = TrainState(), []
    for number in range(7):
        assert state.evaluated(sign * (2.0 - 0.009 * number), mode, min_gain=0.01)
        seen.append(state.stale_evaluations)
    assert seen == [0, 1, 0, 1, 0, 1, 0]
    # A run from before that was written down measures from its best.
    older = replace(state, counted=None)
    assert not older.evaluated(sign * 2.0, mode, min_gain=0.01)
    assert (older.counted, older.stale_evaluations) == (state.best, 1)
    # Control: what gains too little altogether is stale.
    state = TrainState()
    for number in range(4):
        state.evaluated(sign * (2.0 - 0.002 * number), mode, min_gain=0.01)
    assert state.stale_evaluations == 3
