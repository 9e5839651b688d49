"""Models that are built on the meta device, sharded, and only then loaded: no rank ever holds all weights.

Each rank reads its rows from the safetensors files of the base model. That is impossible if a model's parameters have
other names than the tensors in its files (weights that Transformers converts while loading), or are missing there (the
head of a classifier); then the whole model is read first.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from finray import compat
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models import adapters, vocabulary
from finray.models.classifier import labels_in, may_be_new, new_values, stored_name
from finray.models.loading import load_model
from finray.models.quantized import QuantizedLinear
from finray.models.saved_layout import NAME, REFERENCE, without_adapter
from finray.pretrained.tokenizers import new_tokens
from finray.pretrained.weights import StoredWeights, folder_of, like_scales, require_numbers, stored_weights
from finray.sharding import load_local, rows_of, shape_of

_NUMBER = re.compile(r"\.\d+\.")


def base_name(name: str) -> str:
    """The name of a weight in the base model, without an adapter's wrappers."""
    name = name.removeprefix("base_model.model.")
    # Two adapters of one layer's experts are around each other.
    name = name.replace(".token_adapter.", ".").replace(".base_layer", "")
    for around in (".original_module.", f".modules_to_save.{NAME}.", f".modules_to_save.{REFERENCE}."):
        name = name.replace(around, ".")
    return name


def left_out(model: Any, stored: StoredWeights) -> list[str]:
    """Tensors in files that the model lacks although it has similar ones: the model was truncated, mostly in depth.

    Args:
        model: the Transformers or PEFT model, on any device.
        stored: the headers of the base model's files.
    """
    inner = without_adapter(model)
    body = f"{inner.base_model_prefix}."
    names = {base_name(name).removeprefix(body) for name, _ in model.named_parameters(remove_duplicate=False)}
    kinds = {_NUMBER.sub(".", name) for name in names}
    there = {name.removeprefix(body): name for name in stored.tensors}
    return sorted(there[key] for key in there.keys() - names if _NUMBER.search(key) and _NUMBER.sub(".", key) in kinds)


def cut_model(tensors: list[str]) -> str:
    """The message about tensors found by :func:`left_out`."""
    return (
        f"{len(tensors):,} weights in the model's files are of layers that its `config.json` does not ask for, such as "
        f"{tensors[0]}: a cut model is trained"
    )


@torch.no_grad()
def materialize(
    model: Any,
    config: ModelConfig,
    adapter: AdapterConfig,
    *,
    device: torch.device,
    seed: int,
    parameter_device: torch.device | None = None,
) -> bool:
    """Allocate and load a model on the meta device; returns whether the whole model had to be read for it.

    Args:
        model: possibly sharded, possibly with an adapter and packed layers.
        config: of the base model.
        adapter: the adapter section.
        device: of this rank.
        seed: of the adapter, and of weights that no file has.
        parameter_device: where its parameters shall be, if that is another device; buffers are on the device.

    Raises:
        ModelError: a weight cannot be found.
    """
    inner = without_adapter(model)
    _give_memory(model, inner, device, parameter_device or device)
    kept = inner.state_dict().keys()
    tensors = {name: value for name, value in model.named_parameters() if ".lora_" not in name}
    tensors |= {name: value for name, value in inner.named_buffers() if name in kept}
    rows_trained = {name for name in tensors if ".trainable_tokens_" in name}
    base = _BaseWeights(config, inner, {base_name(name) for name in tensors if name not in rows_trained}, seed=seed)
    packed = {f"{name}.weight": value for name, value in model.named_modules() if isinstance(value, QuantizedLinear)}
    for name, tensor in tensors.items():
        if name in packed:
            load_local(tensor, rows_of(packed[name].pack(base.read(base_name(name)).to(device))))
        elif name in rows_trained:
            # All tables have the same new tokens, with consecutive ids.
            ids = next(iter(model.peft_config[NAME].trainable_token_indices.values()))
            table = base_name(name.split(".token_adapter.")[0]) + ".weight"
            load_local(tensor, rows_of(base.read(table, ids[0], ids[-1] + 1)))
        else:
            load_local(tensor, partial(base.read, base_name(name)))
    if adapter.method != "none":
        adapters.start(model, adapter, seed=seed, weight_of=lambda name: base.read(f"{base_name(name)}.weight"))
    return base.is_whole


def _give_memory(model: Any, inner: Any, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate tensors on the meta device; tied ones stay tied, which torch does not ensure.

    Buffers are computed, because rotary frequencies and scales of embeddings are in no file. Meanwhile weights are
    removed from the modules: initialization code could not handle shards.
    """
    from transformers import PreTrainedModel

    places: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=parameter_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for (first, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    # A part that reads images initializes its own modules, by its own configuration.
    models = [module for module in inner.modules() if isinstance(module, PreTrainedModel)]
    owners = {id(part): owner for owner in models for part in owner.modules()}
    for module in inner.modules():
        if any(True for _ in module.buffers(recurse=False)):
            weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, weight in weights.items():
                empty = torch.empty(getattr(weight, "ds_shape", weight.shape), device="meta")
                setattr(module, name, torch.nn.Parameter(empty))
            compat.init_module(owners[id(module)], module)
            for name, weight in weights.items():
                setattr(module, name, weight)


class _BaseWeights:
    """The base model's weights by name: from its files, or from the whole model if names differ there.

    Args:
        config: of the base model.
        model: on any device; shows which tables have rows for tokens.
        wanted: names of the weights.
        seed: of weights that no file has.

    Raises:
        ModelError: a weight cannot be found.
    """

    def __init__(self, config: ModelConfig, model: Any, wanted: set[str], *, seed: int) -> None:
        folder = folder_of(config)
        stored = None if folder is None else stored_weights(folder)
        labels = labels_in(model.config)
        stored_names = {} if stored is None else {name: stored_name(model, name, stored) for name in wanted}
        places = {name: place for name, place in stored_names.items() if place is not None}
        if stored is not None and len(places) < len(wanted):
            published = compat.published_names(model, wanted - places.keys())
            places |= {name: place for name, place in published.items() if place in stored.tensors}
        if stored is not None:
            held = set(places.values())
            require_numbers(stored.coded(held), like_scales(stored.tensors.keys() - held), config.name)
        new = wanted - places.keys()
        if stored is not None and (not new or (labels is not None and all(may_be_new(model, item) for item in new))):
            self._stored, self._places, self.is_whole = stored, places, False
            shapes = {base_name(name): shape_of(item) for name, item in model.named_parameters()}
            self._new = new_values(model.config, {name: shapes[name] for name in new}, seed)
            self._added = new_tokens(config)
            self._tables = {base_name(name) for name in vocabulary.table_weights(model)} if self._added else set()
            return
        self.is_whole, self._new = True, {}
        whole = load_model(config, dtype=torch.float32, seed=seed, labels=labels)
        self._state: dict[str, torch.Tensor] = dict(whole.state_dict())
        if absent := sorted(wanted - self._state.keys()):
            raise ModelError(f"the model has no weight {absent[0]}", where=f"model.name={config.name}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a weight; all rows by default."""
        if self.is_whole or name in self._new:
            tensor = self._state[name] if self.is_whole else self._new[name]
            return tensor[start:stop] if tensor.ndim else tensor
        place = self._places[name]
        if name in self._tables:
            assert self._added is not None
            return vocabulary.read_with_new_rows(self._stored, place, start, stop, self._added)
        return self._stored.read(place, start, stop)
