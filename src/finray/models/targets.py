"""Which layers of a model get an adapter, where PEFT's own rules would take too many or too few.

Transformers holds the experts of a layer as one parameter of three dimensions, which PEFT adapts by its name
(``target_parameters``). The router that chooses experts gets no adapter unless it is named, and neither do the parts of
a model that read images.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finray import compat
from finray.config.schema import AdapterConfig
from finray.models.quantized import QuantizedLinear
from finray.models.saved_layout import NAME, without_adapter
from finray.models.states import read_alone
from finray.models.towers import other_parts, text_tower

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Targets:
    """PEFT's settings of the same names."""

    target_modules: str | list[str]
    target_parameters: list[str] | None = None
    exclude_modules: str | None = None


def experts_of(model: Any) -> dict[str, torch.Tensor]:
    """The matrices of all experts of a layer together (experts, rows, columns), by name."""
    inner = without_adapter(model)
    inside = {id(module) for module in text_tower(inner).modules()}
    return {
        f"{path}.{name}": weight
        for path, module in inner.named_modules()
        if id(module) in inside and "expert" in f"{path} {type(module).__name__}".lower()
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3
    }


def routers_of(model: Any) -> list[str]:
    """Names of the modules that choose experts for a token, or weigh a shared one; and keys, in sparse attention. A
    choice has no gradient, and another one changes more than an adapter should."""
    inner = without_adapter(model)
    modules = dict(inner.named_modules())
    counts = {name.rpartition(".")[0]: weight.shape[0] for name, weight in experts_of(inner).items()}
    lists = {name: module for name, module in modules.items() if isinstance(module, torch.nn.ModuleList)}
    counts |= {name: len(module) for name, module in lists.items() if name.endswith("experts") and len(module) > 1}
    found = set[str]()
    for experts, count in counts.items():
        block = experts.rpartition(".")[0]
        for name, module in modules.items():
            weight = module._parameters.get("weight")
            if weight is None or weight.ndim != 2 or not name.startswith(f"{block}."):
                continue
            within = name.removeprefix(f"{block}.")
            weighs = "gate" in within and weight.shape[0] in (count, 1)
            if not name.startswith(f"{experts}.") and (weighs or "router" in within):
                found.add(name)
    return sorted(found | {name for name, module in modules.items() if ".indexer." in name and is_linear(module)})


def expert_names(model: Any) -> list[str]:
    """What ``adapter.target_modules`` may name beside modules: experts, by their parameter or the matrices in it."""
    return [alias for name in experts_of(model) for alias in _aliases(name)]


def adapter_targets(model: Any, adapter: AdapterConfig) -> Targets:
    """PEFT's settings for ``adapter.target_modules``.

    Args:
        model: the Transformers model.
        adapter: the adapter section.
    """
    asked = adapter.target_modules
    experts, routers, others = experts_of(model), set(routers_of(model)), other_parts(model)
    refused = compat.refused_by_lora(model) if asked == ALL_LINEAR else frozenset[str]()
    without_call = read_alone(model) if asked == ALL_LINEAR else set[str]()
    if not (experts or routers or others or refused or without_call):
        return Targets(asked)
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    outside = {name for name in modules if any(f"{name}.".startswith(f"{part}.") for part in others)}
    left_out = outside | routers | without_call
    wanted, parameters = set[str](), set[str]()
    if asked == ALL_LINEAR:
        linears = {
            name
            for name, module in modules.items()
            if is_linear(module) and module is not head and name.rpartition(".")[2] not in refused
        }
        wanted, parameters = linears - left_out, set(experts)
    else:
        for entry in [asked] if isinstance(asked, str) else asked:
            hits = {name for name in modules if _matches(entry, name, is_regex=isinstance(asked, str))}
            # What is left out is meant only where nothing else is.
            wanted |= hits - left_out or hits
            parameters |= {
                name
                for name in experts
                if any(_matches(entry, alias, is_regex=isinstance(asked, str)) for alias in _aliases(name))
            }
    if not can_adapt_experts(adapter):
        parameters.clear()
    # As parameters: what is no linear layer, and what PEFT would take for experts by its name.
    taken = compat.names_of_experts(model)
    named = {name for name in wanted if name in routers and not is_linear(modules[name])}
    named |= {name for name in wanted if name.rpartition(".")[2] in taken}
    if can_adapt_experts(adapter):
        # The bytes of a quantized layer are no matrix.
        matrices = {name for name in named if type(modules[name]) is not QuantizedLinear}
        parameters |= {f"{name}.weight" for name in matrices if "weight" in modules[name]._parameters}
    wanted -= named
    hidden = sorted(part for part in others if not any(f"{name}.".startswith(f"{part}.") for name in wanted))
    shown = [name for name in modules if not any(f"{name}.".startswith(f"{part}.") for part in hidden)]
    suffixes = _suffixes(wanted, shown)
    every = [f"{path}.{name}" for path, module in modules.items() for name, _ in module.named_parameters(recurse=False)]
    excludes = any(_matches(suffix, name) for suffix in suffixes for name in modules if name not in shown)
    return Targets(
        suffixes,
        _suffixes(parameters, every) or None,
        rf"({'|'.join(re.escape(part) for part in hidden)})\..*" if excludes else None,
    )


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer, and no other use of its matrix."""
    plain = type(module).forward is torch.nn.Linear.forward or type(module) is QuantizedLinear
    return (isinstance(module, torch.nn.Linear) and plain) or type(module).__name__ == "Conv1D"


def can_adapt_experts(adapter: AdapterConfig) -> bool:
    """Whether PEFT's adapters of parameters can do what is asked: they are plain, and drop no inputs."""
    return not adapter.dropout and adapter.method not in ("dora", "pissa")


def shares(model: Any) -> dict[str, int]:
    """Parameters of an adapter by what it is on: ``attention``, ``feed-forward``, ``experts``, ``router``, ``other``;
    a part that does not read text by its name."""
    inner = without_adapter(model)
    # Wrapped by an adapter, they have other names.
    experts = {_unwrapped(name).rpartition(".")[0] for name in experts_of(model)}
    routers, others = {_unwrapped(name) for name in routers_of(model)}, other_parts(model)
    counts: dict[str, int] = {}
    for name, parameter in inner.named_parameters():
        if ".lora_" not in name or f".{NAME}" not in name:
            continue
        layer = _unwrapped(name.partition(".lora_")[0])
        part = next((part for part in others if layer.startswith(part)), None)
        if part is not None:
            kind = part
        elif layer in experts:
            kind = "experts"
        elif layer in routers:
            kind = "router"
        elif re.search(r"attn|attention", layer):
            kind = "attention"
        else:
            kind = "feed-forward" if re.search(r"mlp|feed_forward|ffn|moe|expert", layer) else "other"
        counts[kind] = counts.get(kind, 0) + parameter.numel()
    return counts


def described(model: Any) -> str:
    """What an adapter is on, with the share of each; empty where that is plain linear layers of a whole model."""
    counts = shares(model)
    has_experts = bool(experts_of(model))
    if not counts or not (has_experts or other_parts(model)):
        return ""
    total = sum(counts.values())
    parts = [f"{kind} {count / total:.0%}" for kind, count in sorted(counts.items(), key=lambda item: -item[1])]
    without = [kind for kind in ("experts", "router") if has_experts and kind not in counts]
    return ", ".join(parts) + (f"; none on the {' and '.join(without)}" if without else "")


def _unwrapped(name: str) -> str:
    return name.replace(".base_layer", "")


def _aliases(parameter: str) -> list[str]:
    """Names of a parameter of experts, and of the matrices of an expert in it."""
    owner, _, leaf = parameter.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("w2",)}.get(leaf, ())
    return [parameter, *(f"{owner}.{part}" for part in parts)] + ([owner] if leaf == "weight" else [])


def _matches(entry: str, name: str, *, is_regex: bool = False) -> bool:
    if is_regex:
        return re.fullmatch(entry, name) is not None
    return name == entry or name.endswith(f".{entry}")


def _suffixes(names: Collection[str], among: Iterable[str]) -> list[str]:
    """The shortest endings that match these names and no others."""
    others: Mapping[str, None] = dict.fromkeys(name for name in among if name not in names)
    endings = {ending for name in others for ending in _endings(name)}
    return sorted({next((ending for ending in _endings(name) if ending not in endings), name) for name in names})


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
