"""From the word in the config to the strategy of this process."""

from __future__ import annotations

import torch

from finray.config.schema import Config
from finray.models.loading import resolve_precision
from finray.parallel.base import Strategy
from finray.parallel.ddp import DDPStrategy
from finray.parallel.fsdp import FSDPStrategy


def strategy_of(config: Config, device: torch.device) -> Strategy:
    """The strategy that a config names, for this process of a group."""
    if config.parallel.strategy == "deepspeed":
        from finray.parallel.deepspeed.strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(device, config, precision=resolve_precision(config.train.precision, device))
    if config.parallel.strategy == "fsdp":
        return FSDPStrategy(device, config.parallel, precision=resolve_precision(config.train.precision, device))
    return DDPStrategy(device)
