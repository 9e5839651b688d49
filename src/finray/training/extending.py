"""Extending a run: the checkpoint from which it continues, and the notes about it.

Position *p* of the data stream is the same in a run of any length, and a step takes the next ``global_batch_size``
positions; only the last step of a run of epochs may be smaller. A longer run would have filled it up.
"""

from __future__ import annotations

import math
from pathlib import Path

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir, other_run
from finray.config.identity import length
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import CheckpointError, ConfigError
from finray.training.loader import StepSource
from finray.training.schedule import learning_rate
from finray.training.state import COUNTERS, TrainState


def resume_candidates(store: CheckpointStore, source: StepSource, content: str) -> list[int]:
    """The steps of all checkpoints, ascending, but with those first that a run of this length would not have written.

    Args:
        content: digest of the prepared rows; positions in other rows are meaningless.
    """

    def is_short(step: int) -> bool:
        try:
            store.fetch_file(step, COUNTERS)
            state = TrainState.load(store.path_of(step))
        except CheckpointError:
            return False
        full = state.step * source.global_batch_size
        planned = full if source.total is None else min(full, source.total)
        return state.data == content and state.position != planned

    return sorted(store.steps(), key=lambda step: (not is_short(step), step))


def extend_run(
    config: Config,
    resolved: Resolved,
    state: TrainState,
    source: StepSource,
    planned: int,
    *,
    newest: int,
    run_dir: Path,
) -> tuple[int, list[str]]:
    """Total steps of a continued run, and notes if there are more than before.

    Args:
        state: from which it continues.
        planned: steps of a run that starts now.
        newest: step of the newest checkpoint, before those newer than the state were discarded.
        run_dir: the run directory.

    Raises:
        ConfigError: the run would be shorter than before, or has stopped early and would do so again.
    """
    train, total, steps, before = config.train, source.total, planned, state.total_steps
    if total is not None:
        # Differs from the plan only if an earlier extension had to continue after a step that was not full.
        steps = state.step + math.ceil((total - state.position) / source.global_batch_size)
    if before in (0, steps):
        return steps, []
    field, value = length(config, resolved)
    if steps < before:
        problem = f"{field}: the run was to have {before:,} steps, and {field}={value:g} is {planned:,}"
        raise other_run(RunDir(run_dir), problem, shorter=True)
    stopping = config.evaluation.early_stopping
    if stopping is not None and state.stale_evaluations >= stopping.patience:
        raise ConfigError(
            f"the run stopped early at step {state.step}, and would stop again immediately",
            where="evaluation.early_stopping",
            repair=f"set evaluation.early_stopping.patience to more than {state.stale_evaluations}, or "
            "evaluation.early_stopping to null",
        )
    peak = resolved.learning_rate
    rate, old_rate = (learning_rate(train, peak, update=state.step, total=number) for number in (steps, before))
    change = f"the {train.schedule} schedule is unchanged"
    if not math.isclose(rate, old_rate):
        last = learning_rate(train, peak, update=max(0, state.step - 1), total=before)
        change = (
            f"the learning rate of the {train.schedule} schedule changes from {last:.2e} to {rate:.2e}, and now ends "
            f"at step {steps:,}"
        )
    notes = [f"the run is extended from {before:,} to {steps:,} steps; {change}"]
    if newest > state.step:
        notes.append(f"the last step was not a full one: repeating steps {state.step + 1:,} to {newest:,}")
    elif state.position != state.step * source.global_batch_size:
        notes.append(
            "the last step was not a full one, and there is no earlier checkpoint: later steps see other rows than "
            "in a run of this length from the start"
        )
    return steps, notes
