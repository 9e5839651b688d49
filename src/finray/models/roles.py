"""The roles of parameters that an optimizer treats differently: embeddings, the head, norms."""

from __future__ import annotations

from typing import Any

import torch

from finray.models.saved_layout import without_adapter


def roles_of(model: Any) -> dict[str, str]:
    """``embedding``, ``head`` or ``norm`` by name, for parameters with such a role; includes their adapters."""
    inner = without_adapter(model)
    head = inner.get_output_embeddings()
    heads = {id(head)} if head is not None else set[int]()
    if head is None and hasattr(inner, inner.base_model_prefix):
        # Of a classifier: what it adds to the body.
        heads = {id(child) for name, child in inner.named_children() if name != inner.base_model_prefix}
    roles: dict[str, str] = {}
    for path, module in model.named_modules():
        if id(module) in heads:
            role = "head"
        elif isinstance(getattr(module, "base_layer", module), torch.nn.Embedding):
            role = "embedding"
        # Norms have no common class; they share a name, and have weights of their own.
        elif "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False)):
            role = "norm"
        else:
            continue
        for name, _ in module.named_parameters(prefix=path):
            roles.setdefault(name, role)
    return roles
