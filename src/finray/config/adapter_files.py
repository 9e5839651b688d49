"""The files beside the weights of an adapter or a trained model: PEFT's settings and finray's notes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from finray.config.resolved import Problem
from finray.errors import ModelError
from finray.files import FileKind

# PEFT's names.
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
NOTES = "finray.json"
# What turns images into a model's input: Transformers' names.
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"),
)
# PEFT's settings of a LoRA that a continued adapter keeps. Some only say how it began, or how PEFT computes. All others
# make another method of it, as `use_dora` does; or tie, repeat or extend parts of the model in ways that finray's
# layout of weights does not know.
CONTINUED = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "use_dora"),
        *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "trainable_token_indices", "bias", "fan_in_fan_out", "init_lora_weights"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_core", "runtime_config", "qalora_group_size"),
    }
)
_FILES = FileKind(ModelError, repair="take the file from where the adapter or model was made", links=True)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The part of PEFT's ``adapter_config.json`` that finray reads; not every kind of adapter has all of it."""

    peft_type: str | None = None
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int | None = None
    lora_alpha: float | None = None
    target_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    use_dora: bool = False
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    bias: str = "none"


class Notes(TypedDict, total=False):
    """The notes that finray writes beside weights; docs/formats.md describes each field."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    base_model: str
    revision: str | None
    rows: str
    task: str
    objective: str
    auto_class: str
    new_tokens: list[str]
    problem: Problem
    labels: list[str]
    system: str | None
    tool_format: str
    input_template: str | None
    chat_template_arguments: dict[str, Any] | None
    quantization: str


def matching_none(targets: Iterable[str], names: Iterable[str]) -> list[str]:
    """The entries of ``adapter.target_modules``, whole names or their endings, that match none of a model's modules;
    PEFT ignores them."""
    modules = tuple(names)
    return [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in modules)]


def read_settings(folder: Path) -> AdapterSettings:
    """PEFT's settings of an adapter. Raises ModelError: the file cannot be read, or is something else."""
    return _FILES.json(folder / SETTINGS, AdapterSettings)


def lora_variant(folder: Path) -> str | None:
    """The setting of a LoRA that is not in :data:`CONTINUED`, or that PEFT had no name for; None if all are known.
    Raises ModelError: the file cannot be read."""
    plain = _FILES.json(folder / SETTINGS, dict[str, Any])
    odd = [name for name in sorted(plain) if plain[name] and name not in CONTINUED]
    # finray trains the rows of tokens that it has added, and knows them by their names.
    if plain.get("trainable_token_indices") and not read_notes(folder).get("new_tokens"):
        odd.append("trainable_token_indices")
    return odd[0] if odd else None


def with_base(folder: Path, base: str) -> dict[str, str]:
    """The texts of the files of an adapter that name its base model, with this name; of those that name another."""
    changed: dict[str, str] = {}
    for name, key in ((SETTINGS, "base_model_name_or_path"), (NOTES, "base_model")):
        if (file := folder / name).is_file():
            content = _FILES.json(file, dict[str, Any])
            if content.get(key) != base:
                changed[name] = json.dumps({**content, key: base}, indent=2) + "\n"
    return changed


def read_notes(folder: Path) -> Notes:
    """finray's notes; empty if there is no such file.
    Raises ModelError: the file cannot be read, or is something else."""
    return _FILES.json(folder / NOTES, Notes) if (folder / NOTES).exists() else {}
