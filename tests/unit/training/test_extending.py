"""From where a longer run continues, and what is said of it; without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import ConfigError, FinrayError
from finray.training.extending import extend_run, resume_candidates
from finray.training.state import TrainState


def config(*, patience: int | None = None, **train: Any) -> Config:
    stopping = {} if patience is None else {"evaluation": {"early_stopping": {"patience": patience}, "every_steps": 1}}
    held_out = {} if patience is None else {"eval_ratio": 0.5}
    plain = {
        "model": {"name": "m"},
        "data": {"source": "d", **held_out},
        "train": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.1, **train},
    }
    return build_config({**plain, **stopping}, source="test")


def loader(total: int | None) -> Any:
    return SimpleNamespace(total=total, global_batch_size=8)


def extended(
    state: TrainState, total: int | None, planned: int, *, newest: int | None = None, settings: Config | None = None
) -> tuple[int, list[str]]:
    made = settings or config(epochs=1)
    newest = state.step if newest is None else newest
    decided = {"learning_rate": made.train.learning_rate, "epochs": made.train.epochs}
    resolved = Resolved("fp32", None, "finray_packed", packs=True, strategy="ddp", use_gpu=False, **decided)  # type: ignore[arg-type]
    return extend_run(made, resolved, state, loader(total), planned, newest=newest, run_dir=Path("run"))


def test_nothing_is_said_of_a_run_that_is_as_long_as_before() -> None:
    for before in (0, 5):
        assert extended(TrainState(step=3, position=24, total_steps=before), 40, 5) == (5, [])
        assert extended(TrainState(step=3, position=24, total_steps=before), None, 5) == (5, [])


@pytest.mark.parametrize(
    ("state", "total", "planned", "newest", "steps", "more"),
    [
        # By steps; by epochs; and by epochs where a step was left out and is done again.
        (TrainState(step=3, position=24), None, 7, 3, 7, None),
        (TrainState(step=3, position=24), 40, 5, 3, 5, None),
        (TrainState(step=2, position=16), 1640, 205, 3, 205, "repeating steps 3 to 3"),
        (TrainState(step=2, position=16), 9640, 1205, 1204, 1205, "repeating steps 3 to 1,204"),
        # There is no checkpoint before the step that was not full: what is left is 20 rows, in steps of 8.
        (TrainState(step=3, position=20), 40, 5, 3, 6, "there is no earlier checkpoint"),
        (TrainState(step=3, position=20), None, 5, 3, 5, "there is no earlier checkpoint"),
    ],
)
def test_the_steps_of_a_longer_run(
    state: TrainState, total: int | None, planned: int, newest: int, steps: int, more: str | None
) -> None:
    state.total_steps = 4
    found, said = extended(state, total, planned, newest=newest)
    assert found == steps
    assert said[0] == f"the run is extended from 4 to {steps:,} steps; the constant schedule is unchanged"
    assert len(said) == (1 if more is None else 2)
    assert more is None or more in said[1]


def test_where_the_rate_jumps_both_rates_are_said() -> None:
    """Linear from 1 to 0: the last of four updates has 1/4, the fifth of eight 4/8."""
    settings = config(schedule="linear", learning_rate=1.0, min_learning_rate=0.0, max_steps=8)
    state = TrainState(step=4, position=32, total_steps=4)
    _, (said,) = extended(state, None, 8, settings=settings)
    assert said == (
        "the run is extended from 4 to 8 steps; the learning rate of the linear schedule changes from 2.50e-01 to "
        "5.00e-01, and now ends at step 8"
    )
    # Nothing was updated yet: there is no rate to come from but the first.
    _, (said,) = extended(TrainState(total_steps=4), None, 8, settings=settings)
    assert "is unchanged" in said
    # With a warm-up that is a part of the run, that one is another in a longer run.
    settings = config(learning_rate=1.0, max_steps=8, warmup_steps=None, warmup_ratio=0.5)
    for updates, change in ((0, "5.00e-01 to 2.50e-01"), (1, "5.00e-01 to 5.00e-01"), (2, "1.00e+00 to 7.50e-01")):
        state = TrainState(step=updates, position=8 * updates, total_steps=4)
        _, (said,) = extended(state, None, 8, settings=settings)
        assert f"schedule changes from {change}, and now ends at step 8" in said


def test_a_shorter_run_is_refused_with_both_lengths() -> None:
    state = TrainState(step=3, position=24, total_steps=5)
    with pytest.raises(FinrayError) as caught:
        extended(state, None, 4, settings=config(max_steps=4))
    assert "the run was to have 5 steps, and train.max_steps=4 is 4" in str(caught.value)


@pytest.mark.parametrize(("stale", "refused"), [(1, False), (2, True), (3, True)])
def test_a_run_that_stopped_early_is_not_extended_to_stop_again(stale: int, refused: bool) -> None:
    state = TrainState(step=3, position=24, total_steps=5, stale_evaluations=stale)
    settings = config(max_steps=9, patience=2)
    if not refused:
        assert extended(state, None, 9, settings=settings)[0] == 9
        return
    with pytest.raises(ConfigError, match="stopped early at step 3") as caught:
        extended(state, None, 9, settings=settings)
    assert f"more than {stale}" in str(caught.value.repair)


def test_checkpoints_after_a_step_that_was_not_full_come_last(tmp_path: Path) -> None:
    """The last of the list is looked at first; the first ones only where nothing else is left."""
    store = CheckpointStore(tmp_path)
    positions = {2: 16, 3: 20, 4: 32, 5: 40}
    for step, position in positions.items():
        folder = store.path_of(step) / "training_state"
        folder.mkdir(parents=True)
        data = "others" if step == 5 else "rows"
        (folder / "state.json").write_text(TrainState(step=step, position=position, data=data).text())
    store.path_of(6).mkdir()
    found = {total: resume_candidates(store, loader(total), "rows") for total in (None, 1000, 20, 32)}
    assert found[None] == found[1000] == [3, 2, 4, 5, 6]
    # A run of 20 rows ends with that step.
    assert found[20] == [4, 2, 3, 5, 6]
    assert resume_candidates(store, loader(None), "none of them") == [2, 3, 4, 5, 6]
