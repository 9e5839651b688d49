"""The head of a classifier: its configuration, its new weights, and their initial values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from finray.config.resolved import LabelSet, Problem
from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.limits import shown
from finray.models.adapter_methods import seeded_generator
from finray.pretrained.tokenizers import load_tokenizer
from finray.pretrained.weights import StoredWeights

# Transformers' names of the problem types.
_PROBLEMS: dict[Problem, str] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
_NEW = "_finray_new_weights"


def head_options(labels: LabelSet | None) -> dict[str, Any]:
    """Configuration options of a head for these labels; a regression has one output."""
    if labels is None:
        return {}
    names = labels.names or ("LABEL_0",)
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": _PROBLEMS[labels.problem],
    }


def labels_in(config: Any) -> LabelSet | None:
    """Read the options of :func:`head_options` from a configuration."""
    problem = next(
        (ours for ours, theirs in _PROBLEMS.items() if theirs == getattr(config, "problem_type", None)), None
    )
    if problem is None:
        return None
    return LabelSet(problem, () if problem == "regression" else label_names(config))


def label_names(config: Any) -> tuple[str, ...]:
    """The names of the classes in a configuration, by id. Raises ModelError: an id has no name."""
    names = config.id2label
    if sorted(names) != list(range(len(names))):
        raise ModelError(
            f"the labels in its `id2label` have the ids {shown(sorted(names))}, and not 0 to {len(names) - 1}",
            where=f"model.name={config.name_or_path}",
            repair="correct its config.json, or take it from where the model was made",
        )
    return tuple(str(names[number]) for number in range(len(names)))


def set_padding(model: Any, config: ModelConfig) -> None:
    """Give a model without a padding token its tokenizer's: a decoder's head needs it to find the padding."""
    of_text = model.config.get_text_config()
    if of_text.pad_token_id is None:
        tokenizer = load_tokenizer(config)
        padding = tokenizer.pad_token_id
        of_text.pad_token_id = tokenizer.eos_token_id if padding is None else padding


def may_be_new(model: Any, name: str) -> bool:
    """Whether a weight is part of what a task adds to a body: its head, or the pooler before it."""
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def stored_name(model: Any, name: str, stored: StoredWeights) -> str | None:
    """The name of a weight in files, which may hold only the body or another head; None if it is missing."""
    body = f"{model.base_model_prefix}."
    return next(
        (candidate for candidate in (name, name.removeprefix(body), body + name) if candidate in stored.tensors), None
    )


def mark_new(model: Any, found: StoredWeights | Iterable[str] | None) -> None:
    """Record which weights of a Transformers model are in no file: by name, or given the files to look in."""
    if isinstance(found, StoredWeights):
        names = [name for name, _ in model.named_parameters() if may_be_new(model, name)]
        found = [name for name in names if stored_name(model, name, found) is None]
    setattr(model, _NEW, tuple(found or ()))


def new_weights(model: Any) -> tuple[str, ...]:
    """The weights that :func:`mark_new` recorded."""
    return getattr(model, _NEW, ())


def modules_to_save(model: Any) -> list[str]:
    """The modules that are fully trained with an adapter: the head, and a new pooler.

    PEFT by itself only names ``classifier`` and ``score``; a random layer before them would be frozen, and not saved.
    """
    new = {name.rpartition(".pooler.")[0] + ".pooler" for name in new_weights(model) if ".pooler." in name}
    return sorted(new) + [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    ]


def new_value(name: str, shape: tuple[int, ...], *, seed: int, std: float) -> torch.Tensor:
    """The initial value (fp32) of a weight: normal for a matrix, zeros for a bias, ones for a norm."""
    if len(shape) < 2:
        return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
    return torch.randn(shape, generator=seeded_generator(seed, name)) * std


def new_values(config: Any, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Initial values of new weights, by name, from their shapes and the model's configuration."""
    std = float(getattr(config.get_text_config(), "initializer_range", 0.02))
    return {name: new_value(name, shape, seed=seed, std=std) for name, shape in shapes.items()}
