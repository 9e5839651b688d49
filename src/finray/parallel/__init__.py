"""The strategies: one per file, behind the protocol in ``base``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finray.config.extensions import load_named
from finray.config.resolved import Execution
from finray.config.schema import Config

if TYPE_CHECKING:
    import torch

    from finray.parallel.base import Strategy


def make_strategy(config: Config, execution: Execution, device: torch.device) -> Strategy:
    """The strategy of this process.

    Args:
        config: of the run.
        execution: names the strategy.
        device: of this rank.

    Raises:
        ConfigError: there is no such strategy.
    """
    kind = load_named("finray.strategies", execution.strategy, where="parallel.strategy")
    strategy: Strategy = kind.from_config(config, execution, device)
    return strategy
