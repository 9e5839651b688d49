"""The saved tensors of a model, their names, and loading them.

A PiSSA adapter (Meng et al. 2024) trains the principal part B A of each weight. PEFT subtracts that part from the base
weight; here the base weights stay unchanged, and the initial part is a second, frozen adapter that is subtracted: ``W x
+ s B A x - s B0 A0 x``. Both together are one ordinary LoRA of twice the rank, and are saved as such. So it loads in
plain PEFT on the original base, and a resume reads B0 A0 instead of decomposing again, which would have to be bitwise
the same, for weights that no rank holds whole. The price is a second low-rank product.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finray import compat
from finray.config.adapter_files import WEIGHTS
from finray.errors import ModelError
from finray.pretrained.weights import stored_weights
from finray.sharding import Read, load_local, rows_of, shape_of

# Names of adapters in a model: the trained one, the initial value of a PiSSA adapter, and that of a continued adapter,
# which an objective compares with.
NAME = "default"
PISSA_RESIDUAL = "pissa_residual"
REFERENCE = "finray_reference"


def without_adapter(model: Any) -> Any:
    """The Transformers model in a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class SavedLayout:
    """The layout of a weights directory: Hugging Face's for a whole model, or PEFT's for an adapter.

    Attributes:
        stem: file name of the weights, without suffix.

    Args:
        adapter: of a PEFT model, which one.
    """

    def __init__(self, model: Any, adapter: str = NAME) -> None:
        self._model, self._name = model, adapter
        self._is_adapter = hasattr(model, "get_base_model")
        self._has_residual = self._is_adapter and PISSA_RESIDUAL in model.peft_config
        self.stem = Path(WEIGHTS).stem if self._is_adapter else "model"

    def tensors(self, *, publishes: bool = True) -> dict[str, torch.Tensor]:
        """The tensors to save, by name; they may be shards. Those of a residual have the suffix ``:pissa_residual``.
        Those of a whole model have the names that Transformers writes, or with ``publishes=False`` those in memory."""
        # First: FSDP then reshards what an evaluation has left gathered, and frees that memory.
        kept = self._model.state_dict().keys()
        named = dict(self._model.named_parameters())
        if not self._is_adapter:
            whole: dict[str, torch.Tensor] = named | {
                name: buffer for name, buffer in self._model.named_buffers() if name in kept
            }
            published = compat.published_names(self._model, whole) if publishes else {}
            return {published.get(name, name): tensor for name, tensor in whole.items()}
        from peft import get_peft_model_state_dict

        names = partial(get_peft_model_state_dict, self._model, state_dict=named, save_embedding_layers=False)
        state: dict[str, torch.Tensor] = names(adapter_name=self._name)
        if self._has_residual:
            residual = names(adapter_name=PISSA_RESIDUAL)
            state = state | {f"{name}:{PISSA_RESIDUAL}": tensor for name, tensor in residual.items()}
        return state

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to write to the file, given full tensors of :meth:`tensors`."""
        written = {}
        for name, tensor in tensors.items():
            residual = tensors.get(f"{name}:{PISSA_RESIDUAL}")
            if not name.endswith(f":{PISSA_RESIDUAL}"):
                written[name] = tensor if residual is None else torch.cat([tensor, residual], dim=_rank_dimension(name))
        return written

    @torch.no_grad()
    def load(self, folder: Path, files: Collection[str] | None = None) -> None:
        """Load saved weights into the model, with any sharding: each rank reads its rows.

        Args:
            folder: a directory of weights.
            files: read only these, which its manifest lists; None if it has no manifest.

        Raises:
            ModelError: they are damaged, or belong to another model or adapter.
        """
        repair = "name the base model, adapter method and target modules that they were trained with"
        stored = stored_weights(folder, self.stem, files=files)
        tensors = self.tensors()
        there = set() if stored is None else set(stored.tensors)
        if not self._is_adapter and not tensors.keys() <= there:
            # As earlier versions wrote them.
            tensors = self.tensors(publishes=False)
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
                    f"{name} has shape {shape}, but the model expects {shape_of(tensor)}",
                    where=str(folder),
                    repair=repair,
                )
            load_local(tensor, read)

    def save_settings(self, folder: Path) -> None:
        """Write the files that PEFT or Transformers needs besides the weights."""
        if self._is_adapter:
            config = copy.copy(self._model.peft_config[NAME])
            for name in ("target_modules", "exclude_modules", "modules_to_save"):
                # Sets in PEFT have a different order in each process; equal runs must write equal files.
                if isinstance(value := getattr(config, name), set | list):
                    setattr(config, name, sorted(value))
            if self._has_residual:
                # The scale stays: it is alpha / r, or alpha / sqrt(r).
                config.r = 2 * config.r
                config.lora_alpha = (math.sqrt(2) if config.use_rslora else 2) * config.lora_alpha
            config.save_pretrained(str(folder))
            return
        self._model.config.save_pretrained(str(folder))
        generation = getattr(self._model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))


def _rank_dimension(name: str) -> int:
    return 1 if ".lora_B." in name or ".lora_embedding_B" in name else 0
