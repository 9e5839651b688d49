"""finray: fine-tune language models on Ray.

The Python API, of which the command line is a thin shell:

    from finray import load_config, train
    result = train(load_config("finray.yaml", ["train.max_steps=100"]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from finray.config.load import load_config, with_overrides
    from finray.errors import FinrayError
    from finray.evaluation.artifacts import export_model
    from finray.evaluation.compare import evaluate
    from finray.evaluation.generate import generate_text
    from finray.inspection.inspect import inspect
    from finray.runtime.driver import TrainResult, train
    from finray.runtime.prepare import prepare

_HOMES = {
    "load_config": ("finray.config.load", "load_config"),
    "with_overrides": ("finray.config.load", "with_overrides"),
    "FinrayError": ("finray.errors", "FinrayError"),
    "TrainResult": ("finray.runtime.driver", "TrainResult"),
    "train": ("finray.runtime.driver", "train"),
    "inspect": ("finray.inspection.inspect", "inspect"),
    "prepare": ("finray.runtime.prepare", "prepare"),
    "evaluate": ("finray.evaluation.compare", "evaluate"),
    "export_model": ("finray.evaluation.artifacts", "export_model"),
    "generate_text": ("finray.evaluation.generate", "generate_text"),
}
__all__ = [
    "FinrayError",
    "TrainResult",
    "__version__",
    "evaluate",
    "export_model",
    "generate_text",
    "inspect",
    "load_config",
    "prepare",
    "train",
    "with_overrides",
]


def __getattr__(name: str) -> Any:
    # Lazily, so that `finray config show` does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'finray' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
