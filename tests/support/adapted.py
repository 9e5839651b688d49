"""Tiny models with a LoRA adapter, and adapters on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finray.config.schema import AdapterConfig
from finray.models import adapters
from finray.models.saved_layout import WEIGHTS, SavedLayout
from tests.support import tiny


def lora(seed: int = 1, **fields: Any) -> Any:
    """A tiny Llama with a new adapter."""
    return adapters.add_lora(tiny.build_model("llama"), AdapterConfig(**{"rank": 4, **fields}), seed=seed)


def change(model: Any, std: float) -> None:
    """Give a new adapter, which changes nothing, an effect."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)


def save_adapter(model: Any, folder: Path) -> None:
    """Weights and settings, as a checkpoint has them."""
    layout = SavedLayout(model)
    save_file(layout.tensors(), folder / WEIGHTS)
    layout.save_settings(folder)
