"""The rows of a run, and how they form packs and steps; for the driver, a plan, the workers and an inspection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finray.config.objectives import objective_spec
from finray.config.resolved import Steps
from finray.config.schema import Config, TrainConfig
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit, Splits
from finray.data.sampling.order import total_steps
from finray.data.sampling.packing import PackPlan, one_row_each, plan_packs
from finray.errors import DataError, ModelError

# A step as large as this, unless an epoch would then have fewer steps than that; and as many epochs, within limits, as
# make a run of so many steps. LoRA and its learning rate need some tens of updates to show anything.
_LARGEST_STEP, _EPOCH_STEPS = 8, 32
_RUN_STEPS, _MOST_EPOCHS = 100, 3
# Fewer packs than these are made shorter: a hundred short rows would all fit into one.
_FEWEST_PACKS = 16


@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run."""

    splits: Splits  # rows to train on, and rows that are held out
    plan: PackPlan  # how the rows to train on form packs (or stay single rows)
    steps: Steps  # how the packs form steps
    total_steps: int  # optimizer steps of the run
    total_items: int | None  # packs (or rows) in all of them; None if ``train.max_steps`` decides
    # Where a step is counted in rows, or groups of them, and then packed: tokens of such a pack; None without packing.
    joined: int | None


def run_data(
    config: Config, dataset: PreparedDataset, *, decided: Steps | None = None, is_whole: bool = True
) -> RunData:
    """The rows of a run, with the steps that it has decided on, or else decides on now.

    Args:
        config: of the run.
        dataset: its prepared rows.
        decided: of the run, if it has; only what the config sets since then is changed.
        is_whole: whether the dataset has all rows. From a part of them nothing is decided.

    Raises:
        DataError: too few rows to hold some out, or a row is longer than the packs that were decided on.
    """
    splits = dataset.splits(config.data, seed=config.run.seed)
    groups = splits.train.groups
    lengths, joined = groups.sums(splits.train.lengths), None
    if decided is not None:
        require_room(decided, longest_of(splits.train))
        pack_length = decided.pack_length
    else:
        pack_length = pack_length_of(config, lengths) if is_whole else None
    is_counted = objective_spec(config).counts_rows or not groups.is_single
    if is_counted:
        # Each row has at most `data.max_length` tokens, and all of a group are in one pass.
        pack_length, joined = None, max(config.data.max_length, int(lengths.max())) if config.data.packing else None
    pack = plan_packs if config.data.packing and not is_counted else one_row_each
    plan = pack(lengths, pack_length or config.data.max_length).in_rows(groups)
    steps = decide_steps(config.train, packs=len(plan) if is_whole else None, pack_length=pack_length, before=decided)
    total, items = total_steps(max(1, len(plan)), steps, max_steps=config.train.max_steps)
    return RunData(splits, plan, steps, total, items, joined)


def groups_apart(config: Config) -> ModelError:
    """The error of a model that cannot read a group of rows in one pass."""
    return ModelError(
        "rows of this model cannot share a forward pass, and those that belong together have to",
        where=f"model.name={config.model.name}",
        repair="use a model that can be packed, or another train.objective",
    )


def decide_steps(
    train: TrainConfig, *, packs: int | None, pack_length: int | None = None, before: Steps | None = None
) -> Steps:
    """Decide the size of a step and the number of epochs. Neither depends on the number of workers.

    The size of a micro-batch is that of the config, or of the run, or 1: ``planning/micro_batch.py`` chooses another.

    Args:
        train: of the config; what it sets is taken.
        packs: packs (or rows) to train on; None if that is not known.
        pack_length: tokens that a pack holds; None for ``data.max_length``.
        before: what a continued run began with, which it keeps.
    """
    size, epochs, micro = _LARGEST_STEP, 1.0, 1
    if before is not None:
        size, epochs, pack_length = before.global_batch_size, before.epochs, before.pack_length
        micro = before.micro_batch_size
    elif packs is not None:
        size = min(_LARGEST_STEP, max(1, packs // _EPOCH_STEPS))
    if train.global_batch_size != "auto":
        size = train.global_batch_size
    if train.micro_batch_size != "auto":
        micro = train.micro_batch_size
    if train.epochs is not None:
        epochs = train.epochs
    elif packs is not None and before is None:
        # Also where `train.max_steps` takes its place: a trial of some steps may be extended to the whole run.
        epochs = float(min(_MOST_EPOCHS, math.ceil(_RUN_STEPS / max(1, packs // size))))
    return Steps(size, epochs, pack_length, micro)


def pack_length_of(config: Config, lengths: npt.NDArray[np.int64]) -> int | None:
    """Tokens that a pack holds where ``train.global_batch_size`` is ``auto`` and full packs would be very few; None for
    ``data.max_length``."""
    if config.train.global_batch_size != "auto" or not config.data.packing or not len(lengths):
        return None
    shorter = max(int(lengths.max()), -(-int(lengths.sum()) // _FEWEST_PACKS))
    return shorter if shorter < config.data.max_length else None


def require_room(decided: Steps, longest: int) -> None:
    """Check that the packs of a run that has begun have room for the longest row.
    Raises DataError: they have not, because the data are others now."""
    if decided.pack_length is not None and longest > decided.pack_length:
        raise DataError(
            f"the data have changed since the run began: a row has {longest} tokens, and its packs at most "
            f"{decided.pack_length}",
            where="data.source",
            repair="restore what has changed, or start over with --fresh (in Python fresh=True)",
        )


def longest_of(split: PreparedSplit | None) -> int:
    """Tokens of a split's longest row; 0 where there is none."""
    return 0 if split is None else int(split.lengths.max(initial=0))
