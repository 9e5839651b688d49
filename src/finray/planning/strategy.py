"""Resolves ``parallel.strategy: auto``. Imports torch only to estimate memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.planning.placement import Device

if TYPE_CHECKING:
    from finray.planning.blueprint import ModelShape

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Needs:
    """Estimated peak bytes of a worker."""

    replicated: int  # with all weights on every worker
    sharded: int  # with weights, gradients and optimizer state shared between the workers
    checkpointed: int  # sharded, with activations computed again


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and the reason for it."""

    strategy: Literal["ddp", "fsdp"]
    reason: str

    @property
    def note(self) -> str:
        """A message for the user."""
        return f"parallel.strategy: auto is {self.strategy}: {self.reason}"


def choose_strategy(needs: Needs, *, workers: int, available: int | None, before: str | None = None) -> StrategyChoice:
    """Choose the strategy of a run.

    Without sharding if it fits: that communicates least. A continued run keeps its strategy while that fits, because
    another one sums in a different order, so its steps would only agree up to rounding.

    Args:
        needs: estimated needs of a worker.
        workers: training workers.
        available: bytes available to a worker, or None if not known.
        workers: number of workers, or the fewest that there may be.
        before: the strategy with which the run started, if it continues.
    """
    if workers == 1:
        return StrategyChoice("ddp", "there is only one worker")
    whole, shared = f"{needs.replicated / GIB:.1f} GiB", f"{needs.sharded / GIB:.1f} GiB"
    if available is None:
        if before in ("ddp", "fsdp"):
            return StrategyChoice("ddp" if before == "ddp" else "fsdp", "the run began with it")
        return StrategyChoice("fsdp", f"what a worker has is not known, and shares need {shared} instead of {whole}")
    has = f"a worker has {available / GIB:.1f} GiB"
    if before == "fsdp" and needs.sharded <= available:
        return StrategyChoice("fsdp", f"the run began with it, and its shares of {shared} fit: {has}")
    if needs.replicated <= available:
        return StrategyChoice("ddp", f"all weights on every worker need about {whole}, and {has}")
    reason = f"all weights on every worker would need about {whole}, and {has}; shares need {shared}"
    if needs.sharded <= available:
        return StrategyChoice("fsdp", reason)
    if needs.checkpointed <= available:
        return StrategyChoice(
            "fsdp", f"{reason}, and {needs.checkpointed / GIB:.1f} GiB with train.gradient_checkpointing, which fits"
        )
    return StrategyChoice("fsdp", f"{reason}, which is too much as well: more workers or a smaller batch are needed")


def estimated_choice(
    config: Config,
    execution: Execution,
    device: Device,
    shape: ModelShape | None,
    *,
    workers: int,
    before: str | None,
    may_grow: bool = False,
) -> StrategyChoice:
    """Choose the strategy of a run with several workers, with the reason.

    The estimate assumes full rows with targets everywhere, so that it does not depend on how much of the data is known.

    Args:
        config: with strategy ``auto``.
        execution: the other decisions.
        device: device of a worker.
        shape: of the model with its adapter; None builds it.
        workers: number of workers, or the fewest that there may be.
        before: the strategy with which the run started, if it continues.
        may_grow: whether there may be more workers later, for which the strategy must also work.

    Raises:
        ModelError: the model's configuration cannot be loaded.
    """
    from finray.planning.blueprint import model_shape
    from finray.planning.memory import MARGIN, worst_peak

    model = model_shape(config.model, config.adapter, packs=execution.is_told) if shape is None else shape

    def peak(strategy: str, checkpointing: str | None = None) -> int:
        named = replace(execution, strategy=strategy)
        return worst_peak(config, named, model, device, workers=workers, checkpointing=checkpointing)

    needs = Needs(peak("ddp"), peak("fsdp"), peak("fsdp", "full"))
    available = None if device.memory is None else int((1 - MARGIN) * device.memory)
    return choose_strategy(needs, workers=max(workers, 2) if may_grow else workers, available=available, before=before)
