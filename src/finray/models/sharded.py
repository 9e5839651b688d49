"""Models that are built without memory, sharded, and only then filled: no rank ever holds all weights.

Each rank reads the rows that it keeps from the safetensors files of the base model. Where a model's parameters have
other names than the tensors in its files (weights that Transformers converts while loading), that is not possible, and
the whole model is read first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.models import adapters
from finray.models.loading import load_causal_lm

# Copies rows into a tensor that may be sharded: (tensor, function of first row and the one after the last).
Fill = Callable[[torch.Tensor, Callable[[int, int], torch.Tensor]], None]


def blocks_of(model: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model: the members of lists of modules of one kind, the outermost ones."""
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inside and len(module):
            kinds = {type(member) for member in module}
            if len(kinds) == 1 and any(True for member in module for _ in member.parameters()):
                found += list(module)
                inside |= {id(part) for part in module.modules()}
    return found


def base_name(name: str) -> str:
    """The name of a weight in the base model, without what an adapter puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


class StoredTensors:
    """The tensors of a directory of safetensors files, by name, any rows at a time."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: folder / file for name, file in where.items()}
        else:
            file = folder / "model.safetensors"
            self._files = {}
            if file.is_file():
                with safe_open(file, framework="pt") as opened:
                    self._files = dict.fromkeys(opened.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def reader(self, name: str) -> Callable[[int, int], torch.Tensor]:
        """A function that reads rows of a tensor."""

        def read(start: int, stop: int) -> torch.Tensor:
            with safe_open(self._files[name], framework="pt") as file:
                part = file.get_slice(name)
                tensor: torch.Tensor = part[start:stop] if part.get_shape() else file.get_tensor(name)
                return tensor

        return read


def folder_of(model: ModelConfig) -> Path | None:
    """Where the files of a model lie: its directory, or the cache of the Hub; None where that cannot be told."""
    path = Path(model.name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


@torch.no_grad()
def materialise(
    model: Any,
    config: ModelConfig,
    *,
    device: torch.device,
    seed: int,
    fill: Fill,
    shape_of: Callable[[torch.Tensor], tuple[int, ...]],
) -> bool:
    """Give memory and values to a model on the meta device; returns whether the whole model had to be read for it.

    Args:
        model: possibly sharded, possibly with adapters.
        config: of the base model.
        device: of this rank.
        seed: of the adapters.
        fill: copies the rows that this rank holds.
        shape_of: the shape of a whole tensor, of which this rank may hold nothing.

    Raises:
        ModelError: a weight is nowhere to be found.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    model.to_empty(device=device)
    for module in inner.modules():
        if any(True for _ in module.buffers(recurse=False)):
            # Computed buffers (rotary frequencies, scales of embeddings) are in no file.
            inner._init_weights(module)
    folder = folder_of(config)
    stored = None if folder is None else StoredTensors(folder)
    named = dict(model.named_parameters())
    kept = {name for name, _ in inner.named_buffers()} & set(inner.state_dict())
    tensors = {**named, **{name: buffer for name, buffer in inner.named_buffers() if name in kept}}
    own = {name for name in tensors if ".lora_" in name or ".modules_to_save." in name}
    missing = [name for name in tensors if name not in own and (stored is None or base_name(name) not in stored)]
    source = dict(load_causal_lm(config, dtype=torch.float32).state_dict()) if missing else {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            value = adapters.initial(name, shape_of(tensor), seed=seed)
            fill(tensor, lambda start, stop, value=value: value[start:stop])  # type: ignore[misc]
        elif missing:
            if base_name(name) not in source:
                raise ModelError(f"the model has no weight {base_name(name)}", where=f"model.name={config.name}")
            whole = source[base_name(name)]
            fill(tensor, lambda start, stop, whole=whole: whole[start:stop] if whole.ndim else whole)  # type: ignore[misc]
        else:
            assert stored is not None
            fill(tensor, stored.reader(base_name(name)))
    return bool(missing)
