"""Learning rates: a pure function of the number of updates done."""

from __future__ import annotations

import math

from finray.config.schema import TrainConfig


def warmup_steps(train: TrainConfig, total: int) -> int:
    """Updates of warm-up in a run of ``total``."""
    return train.warmup_steps if train.warmup_steps is not None else math.ceil(train.warmup_ratio * total)


def learning_rate(train: TrainConfig, *, update: int, total: int) -> float:
    """The learning rate of an update.

    Linear from peak/W to the peak over W updates of warm-up, then along a cosine (Loshchilov & Hutter 2017), a line,
    or not at all, towards ``train.min_learning_rate``, which is reached one update after the last.
    ``update`` counts those done before this one, ``total`` those of the run.
    """
    peak, low = train.learning_rate, train.min_learning_rate
    warm = warmup_steps(train, total)
    if update < warm:
        return peak * (update + 1) / warm
    progress = min(1.0, (update - warm) / max(1, total - warm))
    if train.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if train.schedule == "linear":
        return peak + (low - peak) * progress
    return peak
