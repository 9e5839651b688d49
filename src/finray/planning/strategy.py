"""``parallel.strategy: auto``, by an estimate of the memory that each strategy needs."""

from __future__ import annotations

from dataclasses import replace

from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.planning.blueprint import build_blueprint
from finray.planning.memory import MARGIN, worst_peak
from finray.planning.model import PlannedModel, stored_in
from finray.planning.placement import Device
from finray.planning.strategy_choice import Needs, StrategyChoice, choose_strategy


def estimated_choice(
    config: Config, resolved: Resolved, device: Device, model: PlannedModel | None, *, before: str | None
) -> StrategyChoice:
    """The strategy of a run with several workers, and why.

    The estimate is that of full rows, all of them learned, so that it does not depend on how much of the data is known.

    Args:
        config: whose strategy is ``auto``.
        resolved: the rest of what is decided.
        device: what a worker runs on.
        model: as a plan has it; None builds it.
        before: the strategy with which the run began, if it goes on.

    Raises:
        ModelError: the model's configuration cannot be loaded.
    """
    shapes = build_blueprint(config.model, config.adapter) if model is None else model.blueprint
    stored = stored_in(config) if model is None else model.stored

    def peak(strategy: str, *, checkpointing: bool = False) -> int:
        tried = replace(resolved, strategy=strategy)
        return worst_peak(config, tried, shapes, stored, device, checkpointing=checkpointing)

    needs = Needs(peak("ddp"), peak("fsdp"), peak("fsdp", checkpointing=True))
    available = None if device.memory is None else int((1 - MARGIN) * device.memory)
    return choose_strategy(needs, workers=resolved.world_size, available=available, before=before)
