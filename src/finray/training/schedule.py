"""Learning rates, as a pure function of the number of updates."""

from __future__ import annotations

import math

from finray.config.schema import ScheduleOptions, TrainConfig


def warmup_steps(train: TrainConfig, total: int) -> int:
    """Warm-up updates in a run of ``total``."""
    return train.warmup_steps if train.warmup_steps is not None else math.ceil(train.warmup_ratio * total)


def passes_multiple(before: int, after: int, every: float) -> bool:
    """Whether a multiple of ``every`` is in (before, after]; tolerates rounding of fractions."""
    return math.floor(after / every + 1e-6) > math.floor(before / every + 1e-6)


def learning_rate(train: TrainConfig, peak: float, *, update: int, total: int) -> float:
    """The learning rate of an update.

    Linear from peak/W to the peak over W updates of warm-up, then along the schedule towards
    ``train.min_learning_rate``, which is reached one update after the last; ``inverse_sqrt`` never falls below it.
    After the warm-up the formulas are those of Transformers' ``get_scheduler``. ``update`` counts those done before
    this one, at most ``total``, which are those of the run.
    """
    low, options = train.min_learning_rate, train.schedule_options or ScheduleOptions()
    warm = warmup_steps(train, total)
    if update < warm:
        return peak * (update + 1) / warm
    if train.schedule == "inverse_sqrt":
        timescale = options.timescale or warm or 10_000
        return max(low, peak / math.sqrt((update - warm + timescale) / timescale))
    progress = (update - warm) / max(1, total - warm)
    if train.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if train.schedule == "linear":
        return peak + (low - peak) * progress
    if train.schedule == "polynomial":
        return low + (peak - low) * math.pow(1.0 - progress, options.power or 1.0)
    if train.schedule == "cosine_with_restarts":
        # At the end the last cosine is complete, and no new one starts.
        within = progress * (options.num_cycles or 1) % 1.0 if progress < 1.0 else 1.0
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * within))
    if train.schedule == "wsd":
        decay = min(options.num_decay_steps or math.ceil(total / 10), max(1, total - warm))
        done = max(0.0, (update - (total - decay)) / decay)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        shapes = {"cosine": cosine, "linear": 1.0 - done, "1-sqrt": 1.0 - math.sqrt(done)}
        return low + (peak - low) * shapes[options.decay_type or "cosine"]
    return peak
