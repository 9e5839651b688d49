"""Adapters: PEFT injects them, finray gives them their first values and names them for saving.

A PiSSA adapter (Meng et al. 2024) trains the principal part B A of each weight. PEFT takes that part out of the base
weight; here the base weights stay as they are, and the part that it began with is a second, frozen adapter that is
subtracted: ``W x + s B A x - s B0 A0 x``. Both together are one ordinary LoRA of twice the rank, and as such they are
saved. So it loads in plain PEFT on the untouched base, and a resume reads B0 A0 instead of decomposing again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import AdapterConfig
from finray.config.tasks import CAUSAL_LM
from finray.errors import ModelError
from finray.models.adapter_init import PISSA_RESIDUAL, AdapterInit
from finray.models.adapter_methods import LORA, adapter_method
from finray.sharding import load_local, shape_of

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
NAME = "default"


def add_lora(
    model: Any,
    adapter: AdapterConfig,
    *,
    seed: int,
    new_tokens: tuple[int, ...] = (),
    task_type: str = CAUSAL_LM.peft_type,
) -> Any:
    """Wrap a model with an adapter; what it trains is fp32, and begins with values that follow from ``seed`` alone.

    On the meta device there are no values: see :func:`finray.models.sharded.materialise`.

    Args:
        model: the base model.
        adapter: the adapter section.
        seed: of the first values.
        new_tokens: ids whose rows of the embedding, and of a head of its own, are trained too.
        task_type: PEFT's name of the task; the head of a classifier is trained and saved in full.

    Raises:
        ModelError: the target modules match nothing (the message lists what there is), or ``adapter.start_from`` does
            not fit.
    """
    from peft import get_peft_model

    config = _peft_config(model, adapter, new_tokens, task_type)
    try:
        # What PEFT draws is drawn again below.
        with torch.random.fork_rng(devices=[]):
            wrapped = get_peft_model(model, config)
            if adapter_method(adapter.method).is_pissa:
                _keep_start(wrapped, config)
    except ValueError as error:
        raise ModelError(
            f"the adapter cannot be added: {str(error).splitlines()[0]}",
            where="adapter.modules_to_save" if "modules_to_save" in str(error) else "adapter.target_modules",
            repair=f"modules that can be named: {', '.join(linear_names(model))}",
        ) from None
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad or ".lora_" in name:
            parameter.data = parameter.data.float()
    if any(parameter.is_meta for parameter in wrapped.parameters()):
        return wrapped
    if adapter.start_from is not None:
        load_start(wrapped, Path(adapter.start_from))
    else:
        draw(wrapped, adapter.method, seed=seed)
    return wrapped


def _peft_config(model: Any, adapter: AdapterConfig, new_tokens: tuple[int, ...], task_type: str) -> Any:
    from peft import LoraConfig

    if adapter.start_from is not None:
        config = LoraConfig.from_pretrained(adapter.start_from)
        config.lora_dropout = adapter.dropout
        config.inference_mode = False
        # No values are drawn or decomposed for it: they come from its file.
        config.init_lora_weights = True
        return config
    return LoraConfig(
        task_type=task_type,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        modules_to_save=list(adapter.modules_to_save) or None,
        **adapter_method(adapter.method).options,
        trainable_token_indices=_token_rows(model, new_tokens),
        # GPT-2 keeps its projections transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )


def _token_rows(model: Any, new_tokens: tuple[int, ...]) -> dict[str, list[int]] | None:
    """Rows that are trained, by the name of the table: the embedding, and the head where it is not tied to that."""
    if not new_tokens:
        return None
    tables = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not tables[0].weight:
        tables.append(head)
    return {name: list(new_tokens) for name, module in model.named_modules() if any(module is one for one in tables)}


def token_rows(model: Any) -> list[int]:
    """Ids of the new tokens whose rows an adapter trains; all its tables have the same."""
    indices = model.peft_config[NAME].trainable_token_indices or {}
    return list(next(iter(indices.values()), []))


def _keep_start(wrapped: Any, config: Any) -> None:
    """Add the frozen adapter that holds what a PiSSA adapter began with."""
    from peft.tuners.lora.layer import LoraLayer

    second = copy.copy(config)
    second.lora_dropout, second.modules_to_save, second.trainable_token_indices = 0.0, None, None
    wrapped.add_adapter(PISSA_RESIDUAL, second)
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter([NAME, PISSA_RESIDUAL])
    for name, parameter in wrapped.named_parameters():
        if f".{PISSA_RESIDUAL}." in name:
            parameter.requires_grad_(False)


def adapter_init(model: Any, method: str, *, seed: int, base: Callable[[str], torch.Tensor]) -> AdapterInit:
    """First values of a model's adapter; ``base`` gives the base weight (out, in) of a module by name."""
    modules = dict(model.named_modules())
    # Weights that are all trained begin as they are in their files, and nobody asks for a first value.
    kind = LORA if method == "none" else adapter_method(method)
    return AdapterInit(kind, seed=seed, scaling=lambda name: float(modules[name].scaling[NAME]), base=base)


@torch.no_grad()
def draw(model: Any, method: str, *, seed: int) -> None:
    """Give every tensor of an adapter its first value."""
    modules = dict(model.named_modules())

    def base(name: str) -> torch.Tensor:
        weight: torch.Tensor = modules[name].base_layer.weight.detach()
        return weight.T if modules[name].fan_in_fan_out else weight

    values = adapter_init(model, method, seed=seed, base=base)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(values(name, parameter.shape))


def linear_names(model: Any) -> list[str]:
    """Endings of the names of the linear layers of a model."""
    kinds = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(kinds)


# --- saving and loading ---------------------------------------------------------------------------------------------


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, which may be shards, under the names that PEFT gives them in its file.

    Those of the frozen residual of a PiSSA adapter have ``:pissa_residual`` behind their names; :func:`joined` makes a
    file's tensors of all of them, and :func:`part_of` finds them there.
    """
    from peft import get_peft_model_state_dict

    tensors = dict(model.named_parameters())
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, state_dict=tensors, adapter_name=NAME, save_embedding_layers=False
    )
    if PISSA_RESIDUAL in model.peft_config:
        residual: dict[str, torch.Tensor] = get_peft_model_state_dict(
            model, state_dict=tensors, adapter_name=PISSA_RESIDUAL, save_embedding_layers=False
        )
        found = found | {f"{name}:{PISSA_RESIDUAL}": tensor for name, tensor in residual.items()}
    return found


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file, of whole tensors."""
    return {
        name: torch.cat([tensor, tensors[f"{name}:{PISSA_RESIDUAL}"]], dim=_rank_dimension(name))
        if f"{name}:{PISSA_RESIDUAL}" in tensors
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith(f":{PISSA_RESIDUAL}")
    }


def _rank_dimension(name: str) -> int:
    return 1 if ".lora_B." in name else 0


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two halves of a tensor in a file, which is read by rows."""

    whole: Any
    dimension: int
    number: int

    def get_shape(self) -> list[int]:
        """Shape of the half."""
        shape = list(self.whole.get_shape())
        shape[self.dimension] //= 2
        return shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Rows of the half."""
        start, stop = rows.start, rows.stop
        size = self.get_shape()[self.dimension]
        first = self.number * size
        part: torch.Tensor
        if self.dimension == 0:
            part = self.whole[first + start : first + stop]
        else:
            part = self.whole[start:stop, first : first + size]
        return part


def part_of(name: str, has_start: bool) -> tuple[str, Callable[[Any], Half] | None]:
    """Name in the file of a tensor of :func:`adapter_tensors`, and which half of it is meant, if it is one."""
    own, _, second = name.partition(":")
    if not has_start or ".lora_" not in own:
        return own, None
    return own, lambda whole: Half(whole, _rank_dimension(own), 1 if second else 0)


def saved_settings(model: Any) -> Any:
    """PEFT's configuration of the adapter as it is saved."""
    config = copy.copy(model.peft_config[NAME])
    if PISSA_RESIDUAL in model.peft_config:
        config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
    return config


@torch.no_grad()
def load_start(model: Any, folder: Path) -> None:
    """Put the values of a saved adapter into a model's.

    Raises:
        ModelError: it has other tensors.
    """
    from safetensors import safe_open

    tensors = adapter_tensors(model)
    where = f"adapter.start_from={folder}"
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            if set(file.keys()) != tensors.keys():
                odd = sorted(set(file.keys()) ^ tensors.keys())
                raise ModelError(
                    f"the adapter and the model differ in {len(odd)} tensors, such as {odd[0]}", where=where
                )
            for name, tensor in tensors.items():
                part = file.get_slice(name)
                if tuple(part.get_shape()) != shape_of(tensor):
                    raise ModelError(
                        f"{name} has shape {tuple(part.get_shape())}, the model wants {shape_of(tensor)}",
                        where=where,
                        repair="name the base model of that adapter as model.name",
                    )
                load_local(tensor, lambda start, stop, part=part: part[start:stop])  # type: ignore[misc]
    except OSError as error:
        raise ModelError(f"the adapter cannot be read: {error}", where=where) from None


def load_adapter(model: Any, folder: Path) -> Any:
    """Wrap a base model with a saved adapter, for inference."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(
            f"the adapter does not fit the model: {str(error).splitlines()[0]}", where=str(folder)
        ) from None
