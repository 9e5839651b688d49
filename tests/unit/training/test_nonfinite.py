"""Loss scaling by the rule of torch's own GradScaler, and what ends a run; without a model."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finray.errors import TrainingError
from finray.training import nonfinite
from finray.training.nonfinite import NonFiniteGuard
from finray.training.state import TrainState
from tests.support.examples import examples

CPU = torch.device("cpu")


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_the_scale_begins_and_grows_as_torchs_does() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_scale() == nonfinite.FIRST_SCALE
    assert scaler.get_growth_interval() == nonfinite.GROWTH_STEPS
    # After so many halvings it is not the scale that is wrong.
    assert nonfinite.FIRST_SCALE / 2**nonfinite.MOST_SKIPPED == 2.0**-4


@settings(deadline=None, max_examples=examples(60))
@given(overflows=st.lists(st.booleans(), max_size=24), interval=st.integers(1, 4), read=st.integers(1, 5))
def test_the_scale_follows_torchs_rule_and_is_the_same_after_a_resume(
    overflows: list[bool], interval: int, read: int
) -> None:
    scale, tracker = torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    state = TrainState()
    in_row = skipped = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "GROWTH_STEPS", interval)
        patch.setattr(nonfinite, "MOST_SKIPPED", 100)
        guard = NonFiniteGuard(state, CPU, scaled=True)
        for step, overflow in enumerate(overflows, start=1):
            assert float(guard.scale(number(0.5))) == float(scale) / 2
            found = guard.observe(step, number(1.0), number(math.inf if overflow else 2.0), (step,))
            assert (float(found), found.dtype) == (float(overflow), torch.float32)
            torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
            skipped += overflow
            in_row = in_row + 1 if overflow else 0
            if step % read == 0:
                guard.raise_if_bad(state)
                assert (state.loss_scale, state.good_steps) == (float(scale), int(tracker))
                assert (state.skipped, state.skipped_in_row) == (skipped, in_row)
                guard = NonFiniteGuard(TrainState(**asdict(state)), CPU, scaled=True)


def observed(guard: NonFiniteGuard, *steps: tuple[float, float]) -> list[float]:
    """What each step of (loss, norm) tells the optimizer."""
    return [
        float(guard.observe(step, number(loss), number(norm), tuple(range(step * 10, step * 10 + 20))))
        for step, (loss, norm) in enumerate(steps, start=1)
    ]


@pytest.mark.parametrize(
    ("bad", "said"),
    [((math.nan, 1.0), "the loss is nan at step 2"), ((1.0, math.inf), "the gradient norm is inf at step 2")],
)
def test_the_first_step_that_is_not_finite_is_named_and_no_update_after_it_changes_anything(
    bad: tuple[float, float], said: str
) -> None:
    guard = NonFiniteGuard(TrainState(), CPU, scaled=False)
    assert observed(guard, (1.0, 1.0), bad, (1.0, 1.0), (math.nan, math.nan)) == [0.0, 1.0, 1.0, 1.0]
    state = TrainState()
    with pytest.raises(TrainingError, match=said) as caught:
        guard.raise_if_bad(state)
    assert caught.value.where == f"prepared rows {', '.join(str(row) for row in range(20, 36))}, ..."
    assert "bf16" not in str(caught.value.repair)
    assert state == TrainState()


def test_few_rows_are_all_named() -> None:
    guard = NonFiniteGuard(TrainState(), CPU, scaled=False)
    guard.observe(1, number(math.nan), number(1.0), tuple(range(16)))
    with pytest.raises(TrainingError) as caught:
        guard.raise_if_bad(TrainState())
    assert caught.value.where == f"prepared rows {', '.join(map(str, range(16)))}"


def test_a_loss_that_is_not_finite_ends_a_run_in_fp16_at_once() -> None:
    guard = NonFiniteGuard(TrainState(), CPU, scaled=True)
    assert observed(guard, (1.0, 1.0), (math.inf, math.nan)) == [0.0, 1.0]
    with pytest.raises(TrainingError, match="the loss is inf at step 2") as caught:
        guard.raise_if_bad(TrainState())
    assert "set train.precision to bf16" in str(caught.value.repair)


def test_gradients_that_stay_too_large_for_fp16_end_a_run_and_one_good_step_in_between_does_not() -> None:
    bad: Any = (1.0, math.inf)
    most = nonfinite.MOST_SKIPPED
    guard = NonFiniteGuard(TrainState(), CPU, scaled=True)
    observed(guard, *[bad] * (most - 1), (1.0, 1.0), *[bad] * (most - 1))
    guard.raise_if_bad(TrainState())
    guard.observe(2 * most, number(1.0), number(math.inf), ())
    with pytest.raises(TrainingError, match=f"the gradients of {most} steps in a row .* the last at step {2 * most};"):
        guard.raise_if_bad(TrainState())


def test_a_run_that_is_not_scaled_keeps_no_scale() -> None:
    state = TrainState()
    guard = NonFiniteGuard(state, CPU, scaled=False)
    assert float(guard.scale(number(3.0))) == 3.0
    observed(guard, (1.0, 1.0))
    guard.raise_if_bad(state)
    assert state == TrainState()
