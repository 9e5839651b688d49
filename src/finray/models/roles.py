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
        if head is not None and module is head:
            role = "head"
        elif isinstance(getattr(module, "base_layer", module), torch.nn.Embedding):
            role = "embedding"
        # Norms share no class; they share a name, and weights of their own.
        elif "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False)):
            role = "norm"
        else:
            continue
        for name, _ in module.named_parameters(prefix=path):
            found.setdefault(name, role)
    return found
