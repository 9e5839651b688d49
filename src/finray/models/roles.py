"""What the parameters of a model are, where an optimizer treats them apart: embeddings, the head, norms."""

from __future__ import annotations

from typing import Any

import torch


def roles_of(model: Any) -> dict[str, str]:
    """``embedding``, ``head`` or ``norm`` by name, for parameters that are; what an adapter adds to one is one too."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inner.get_output_embeddings()
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        role = _role(module, head)
        if role is not None:
            for name, _ in module.named_parameters(prefix=path):
                found.setdefault(name, role)
    return found


def _role(module: torch.nn.Module, head: torch.nn.Module | None) -> str | None:
    if head is not None and module is head:
        return "head"
    kind = getattr(module, "base_layer", module)
    if isinstance(kind, torch.nn.Embedding):
        return "embedding"
    # Norms share no class; they share a name, and weights of their own.
    if "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False)):
        return "norm"
    return None
