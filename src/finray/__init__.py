"""finray: fine-tune language models on Ray.

The Python API does what the command line does, with the same defaults:

    import finray
    result = finray.train("finray.yaml", train={"max_steps": 100})
    result.metrics["loss"].plot()
    print(finray.generate(result, "Hello!")[0])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from finray.api import evaluate, export, generate, inspect, load_config, plan, prepare, pull, push, report, train
    from finray.config.schema import Config
    from finray.errors import FinrayError
    from finray.reporting.run import TrainResult

_HOMES = {
    "Config": "finray.config.schema",
    "FinrayError": "finray.errors",
    "TrainResult": "finray.reporting.run",
    "evaluate": "finray.api",
    "export": "finray.api",
    "generate": "finray.api",
    "inspect": "finray.api",
    "load_config": "finray.api",
    "plan": "finray.api",
    "prepare": "finray.api",
    "pull": "finray.api",
    "push": "finray.api",
    "report": "finray.api",
    "train": "finray.api",
}
__all__ = [
    "Config",
    "FinrayError",
    "TrainResult",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "load_config",
    "plan",
    "prepare",
    "pull",
    "push",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    # Lazily, so that `finray config show` does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'finray' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
