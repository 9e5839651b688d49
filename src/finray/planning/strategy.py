"""``parallel.strategy: auto``, resolved once for a plan and once for a run, by the same estimate."""

from __future__ import annotations

from finray.config.schema import Config
from finray.models.packing_check import try_packing
from finray.planning.blueprint import Blueprint, build_blueprint
from finray.planning.memory import MARGIN, Device, worst_peak
from finray.planning.model import stored_in
from finray.planning.strategy_choice import Needs, StrategyChoice, choose_strategy
from finray.pretrained.weights import StoredWeights


def resolve_strategy(
    config: Config,
    blueprint: Blueprint,
    stored: StoredWeights | None,
    device: Device,
    *,
    packs: bool,
    before: str | None = None,
) -> tuple[Config, StrategyChoice]:
    """The config with a strategy in the place of ``auto``, and the choice.

    The estimate is that of full rows, all of them learned, so that it does not depend on how much of the data is known.

    Args:
        config: whose strategy is ``auto``.
        blueprint: of the model with its adapter.
        stored: headers of the weights, where they are known.
        device: what a worker runs on.
        packs: whether the model's rows may be packed.
        before: the strategy with which the run began, if it goes on.
    """

    def peak(strategy: str, *, checkpointing: bool = False) -> int:
        return worst_peak(
            with_strategy(config, strategy), blueprint, stored, device, packs=packs, checkpointing=checkpointing
        )

    needs = Needs(peak("ddp"), peak("fsdp"), peak("fsdp", checkpointing=True))
    available = None if device.memory is None else int((1 - MARGIN) * device.memory)
    choice = choose_strategy(needs, workers=config.cluster.num_workers, available=available, before=before)
    return with_strategy(config, choice.strategy), choice


def resolve_for_run(config: Config, device: Device, *, before: str | None) -> tuple[Config, StrategyChoice]:
    """As :func:`resolve_strategy`, for a run that is about to start.

    Raises:
        ModelError: the model's configuration cannot be loaded.
    """
    if config.cluster.num_workers == 1:
        choice = choose_strategy(Needs(0, 0, 0), workers=1, available=None)
        return with_strategy(config, choice.strategy), choice
    blueprint = build_blueprint(config.model, config.adapter)
    packs = try_packing(config.model).safe
    return resolve_strategy(config, blueprint, stored_in(config), device, packs=packs, before=before)


def with_strategy(config: Config, strategy: str) -> Config:
    """The config with another strategy."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": strategy})})
