"""What is saved of a model, under which names, and where a tensor of it is found in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finray.models import adapters
from finray.models.adapter_init import PISSA_RESIDUAL


class SavedLayout:
    """The layout of a directory of weights: Hugging Face's of a whole model, or PEFT's of an adapter.

    Attributes:
        stem: name of the weights' file, without its suffix.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_adapter = hasattr(model, "get_base_model")
        self.stem = Path(adapters.WEIGHTS).stem if self._is_adapter else "model"

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved, by name; tensors may be shards."""
        if self._is_adapter:
            return adapters.adapter_tensors(self._model)
        kept = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in kept}
        return {**dict(self._model.named_parameters()), **buffers}

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written, given full tensors of :meth:`tensors`."""
        return adapters.joined(tensors) if self._is_adapter else tensors

    def place_of(self, name: str) -> tuple[str, Callable[[Any], Any] | None]:
        """Name in the file of a tensor of :meth:`tensors`, and which slice of what is there, if not all."""
        if not self._is_adapter:
            return name, None
        return adapters.part_of(name, PISSA_RESIDUAL in self._model.peft_config)

    def save_settings(self, folder: Path) -> None:
        """Write what PEFT or Transformers needs beside the weights."""
        if self._is_adapter:
            adapters.saved_settings(self._model).save_pretrained(str(folder))
            return
        self._model.config.save_pretrained(str(folder))
        generation = getattr(self._model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))
