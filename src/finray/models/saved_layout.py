"""What is saved of a model, under which names, and putting it back.

A PiSSA adapter (Meng et al. 2024) trains the principal part B A of each weight. PEFT takes that part out of the base
weight; here the base weights stay as they are, and the part that it began with is a second, frozen adapter that is
subtracted: ``W x + s B A x - s B0 A0 x``. Both together are one ordinary LoRA of twice the rank, and as such they are
saved. So it loads in plain PEFT on the untouched base, and a resume reads B0 A0 instead of decomposing again, which
would have to be the same to the bit, of weights that no rank holds whole. The price is a second low-rank product.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finray.config.adapter_files import WEIGHTS
from finray.errors import ModelError
from finray.pretrained.weights import stored_weights
from finray.sharding import Read, load_local, rows_of, shape_of

# Names of adapters in a model: the one that is trained, and what a PiSSA adapter began with.
NAME = "default"
PISSA_RESIDUAL = "pissa_residual"


class SavedLayout:
    """The layout of a directory of weights: Hugging Face's of a whole model, or PEFT's of an adapter.

    Attributes:
        stem: name of the weights' file, without its suffix.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_adapter = hasattr(model, "get_base_model")
        self._has_residual = self._is_adapter and PISSA_RESIDUAL in model.peft_config
        self.stem = Path(WEIGHTS).stem if self._is_adapter else "model"

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved, by name; tensors may be shards. Those of a residual have ``:pissa_residual`` behind it."""
        # First: FSDP shards again by it what an evaluation has left whole, and frees that memory.
        kept = self._model.state_dict().keys()
        named = dict(self._model.named_parameters())
        if not self._is_adapter:
            return named | {name: buffer for name, buffer in self._model.named_buffers() if name in kept}
        from peft import get_peft_model_state_dict

        names = partial(get_peft_model_state_dict, self._model, state_dict=named, save_embedding_layers=False)
        found: dict[str, torch.Tensor] = names(adapter_name=NAME)
        if self._has_residual:
            residual = names(adapter_name=PISSA_RESIDUAL)
            found = found | {f"{name}:{PISSA_RESIDUAL}": tensor for name, tensor in residual.items()}
        return found

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written, given full tensors of :meth:`tensors`."""
        written = {}
        for name, tensor in tensors.items():
            residual = tensors.get(f"{name}:{PISSA_RESIDUAL}")
            if not name.endswith(f":{PISSA_RESIDUAL}"):
                written[name] = tensor if residual is None else torch.cat([tensor, residual], dim=_rank_dimension(name))
        return written

    @torch.no_grad()
    def load(self, folder: Path, files: Collection[str] | None = None) -> None:
        """Put saved weights into the model, sharded by any strategy: each rank reads the rows that it holds.

        Args:
            folder: a directory of weights.
            files: the only ones to read, as its manifest lists them; None where it has none.

        Raises:
            ModelError: they are damaged, or of another model or adapter.
        """
        repair = "name the base model, adapter method and target modules that they were trained with"
        stored = stored_weights(folder, self.stem, files=files)
        tensors = self.tensors()
        there = set() if stored is None else set(stored.tensors)
        odd = sorted(there ^ {name.partition(":")[0] for name in tensors})
        if stored is None or odd:
            raise ModelError(
                f"the saved weights and the model differ in {len(odd)} tensors, such as {odd[0]}",
                where=str(folder),
                repair=repair,
            )
        for name, tensor in tensors.items():
            place, _, second = name.partition(":")
            shape = stored.tensors[place].shape
            read: Read = partial(stored.read, place)
            if self._has_residual and ".lora_" in place:
                half = stored.read(place).chunk(2, dim=_rank_dimension(place))[bool(second)]
                shape, read = tuple(half.shape), rows_of(half)
            if shape != shape_of(tensor):
                raise ModelError(
                    f"{name} has shape {shape}, the model wants {shape_of(tensor)}", where=str(folder), repair=repair
                )
            load_local(tensor, read)

    def save_settings(self, folder: Path) -> None:
        """Write what PEFT or Transformers needs beside the weights."""
        if self._is_adapter:
            config = copy.copy(self._model.peft_config[NAME])
            for name in ("target_modules", "exclude_modules", "modules_to_save"):
                # Sets in PEFT, whose order is another in each process; equal runs write equal files.
                if isinstance(value := getattr(config, name), set | list):
                    setattr(config, name, sorted(value))
            if self._has_residual:
                config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
            config.save_pretrained(str(folder))
            return
        self._model.config.save_pretrained(str(folder))
        generation = getattr(self._model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))


def _rank_dimension(name: str) -> int:
    return 1 if ".lora_B." in name else 0
