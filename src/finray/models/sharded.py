"""Models that are built without memory, sharded, and only then filled: no rank ever holds all weights.

Each rank reads the rows that it keeps from the safetensors files of the base model. Where a model's parameters have
other names than the tensors in its files (weights that Transformers converts while loading), that is not possible, and
the whole model is read first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finray import compat
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters, vocabulary
from finray.models.loading import load_model
from finray.models.quantised import QuantisedLinear
from finray.pretrained.tokenizers import new_tokens
from finray.sharding import Read, load_local, shape_of


def base_name(name: str) -> str:
    """The name of a weight in the base model, without what an adapter puts around it."""
    name = name.removeprefix("base_model.model.")
    for around in (
        ".token_adapter.base_layer.",
        ".base_layer.",
        ".original_module.",
        f".modules_to_save.{adapters.NAME}.",
    ):
        name = name.replace(around, ".")
    return name


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

    def rows(self, name: str) -> int:
        """First dimension of a tensor."""
        with safe_open(self._files[name], framework="pt") as file:
            return int(file.get_slice(name).get_shape()[0])

    def reader(self, name: str) -> Read:
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


def _compute_buffers(model: Any, module: torch.nn.Module) -> None:
    """Fill the buffers of a module. Its weights stay out of it: of a share, what initialises them finds no rows."""
    weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    try:
        for name, weight in weights.items():
            shape = getattr(weight, "ds_shape", weight.shape)
            setattr(module, name, torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        compat.init_module(model, module)
    finally:
        for name, weight in weights.items():
            setattr(module, name, weight)


@torch.no_grad()
def materialise(
    model: Any,
    config: ModelConfig,
    adapter: AdapterConfig,
    *,
    device: torch.device,
    seed: int,
) -> bool:
    """Give memory and values to a model on the meta device; returns whether the whole model had to be read for it.

    Args:
        model: possibly sharded, possibly with an adapter and packed layers.
        config: of the base model.
        adapter: the adapter section.
        device: of this rank.
        seed: of the adapter, and of weights that no file has.

    Raises:
        ModelError: a weight is nowhere to be found.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    _give_memory(model, device)
    for module in inner.modules():
        if any(True for _ in module.buffers(recurse=False)):
            # Computed buffers (rotary frequencies, scales of embeddings) are in no file.
            _compute_buffers(inner, module)
    kept = {name for name, _ in inner.named_buffers()} & set(inner.state_dict())
    tensors = {**dict(model.named_parameters()), **{name: one for name, one in inner.named_buffers() if name in kept}}
    of_adapter = {name for name in tensors if ".lora_" in name or ".trainable_tokens_" in name}
    source = _Source(config, inner, {base_name(name) for name in tensors if name not in of_adapter}, seed=seed)
    packed = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, QuantisedLinear)}
    modules = dict(model.named_modules())

    def base(name: str) -> torch.Tensor:
        weight = source.whole(f"{base_name(name)}.weight")
        return weight.T if modules[name].fan_in_fan_out else weight

    values = adapters.adapter_init(model, adapter.method, seed=seed, base=base)
    for name, tensor in tensors.items():
        if name in packed:
            content = packed[name].pack(source.whole(base_name(name)).to(device))
            load_local(tensor, lambda start, stop, content=content: content[start:stop])  # type: ignore[misc]
        elif ".trainable_tokens_" in name:
            table = source.reader(base_name(name.split(".token_adapter.")[0]) + ".weight")
            rows = adapters.token_rows(model)
            load_local(tensor, lambda start, stop, read=table, rows=rows: _gathered(read, rows[start:stop]))  # type: ignore[misc]
        elif ".lora_" not in name:
            load_local(tensor, source.reader(base_name(name)))
        elif adapter.start_from is None:
            value = values(name, torch.Size(shape_of(tensor)))
            load_local(tensor, lambda start, stop, value=value: value[start:stop])  # type: ignore[misc]
    if adapter.start_from is not None:
        adapters.load_start(model, Path(adapter.start_from))
    return source.is_whole


def _give_memory(model: Any, device: torch.device) -> None:
    """Memory for tensors on the meta device; those that are tied stay tied, which torch does not see to."""
    places: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, own), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, own))


def _gathered(read: Read, rows: list[int]) -> torch.Tensor:
    return torch.cat([read(row, row + 1) for row in rows])


class _Source:
    """The base model's weights by name: from its files, or from the whole model where they have other names there.

    Args:
        config: of the base model.
        model: it, on any device; tells which tables have rows for words.
        wanted: names of the weights.
        seed: of weights that no file has.

    Raises:
        ModelError: a weight is nowhere to be found.
    """

    def __init__(self, config: ModelConfig, model: Any, wanted: set[str], *, seed: int) -> None:
        folder = folder_of(config)
        self._stored = None if folder is None else StoredTensors(folder)
        self.is_whole = self._stored is None or any(name not in self._stored for name in wanted)
        self._model = dict(load_model(config, dtype=torch.float32, seed=seed).state_dict()) if self.is_whole else {}
        self._new = new_tokens(config)
        self._tables = {base_name(name) for name in vocabulary.table_weights(model)}
        absent = sorted(wanted - self._model.keys()) if self.is_whole else []
        if absent:
            raise ModelError(f"the model has no weight {absent[0]}", where=f"model.name={config.name}")

    def reader(self, name: str) -> Read:
        """A function that reads rows of a weight."""
        if self.is_whole:
            tensor = self._model[name]
            return lambda start, stop: tensor[start:stop] if tensor.ndim else tensor
        assert self._stored is not None
        read = self._stored.reader(name)
        if self._new is None or name not in self._tables:
            return read
        return vocabulary.with_new_rows(read, self._stored.rows(name), self._new)

    def whole(self, name: str) -> torch.Tensor:
        """All rows of a weight."""
        if self.is_whole:
            tensor: torch.Tensor = self._model[name]
            return tensor
        assert self._stored is not None
        return self._stored.reader(name)(0, self._stored.rows(name))
