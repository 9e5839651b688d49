"""Tiny models with a LoRA adapter, and adapters on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finray.config.adapter_files import NOTES
from finray.config.schema import AdapterConfig, ModelConfig
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


def save_classifier(model: Any, folder: Path, config: ModelConfig, tokenizer: Any, **notes: Any) -> None:
    """As a run saves: weights and settings by the layout, and the notes beside them."""
    layout = SavedLayout(model)
    folder.mkdir()
    whole = {name: tensor.detach().contiguous() for name, tensor in layout.tensors().items()}
    save_file(layout.in_file(whole), folder / f"{layout.stem}.safetensors", metadata={"format": "pt"})
    layout.save_settings(folder)
    tokenizer.save_pretrained(str(folder))
    told = {"base_model": config.name, "rows": "labelled", "task": config.task}
    told |= {"auto_class": "AutoModelForSequenceClassification", **notes}
    (folder / NOTES).write_text(json.dumps(told), encoding="utf-8")
