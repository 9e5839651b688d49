"""Liger's kernels for norms, rotary embeddings and gated feed-forward layers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from finray import compat
from finray.errors import ModelError
from finray.models.saved_layout import without_adapter

# What Liger has replaced in Transformers' modules, by name of the module: Transformers' own.
_REPLACED: dict[str, dict[str, Any]] = {}
# finray's loss computes logits only at targets, which Liger's does not.
_NOT_ITS_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply(model: Any, *, checkpointing: str = "none") -> None:
    """Patch a model with Liger's layers; a model family that Liger does not support is unchanged.

    Liger also replaces classes and functions of the family's module in Transformers, for every model of this process.
    Its kernels run on GPUs only, so models that are created later, and tensors on a CPU, get Transformers' own.

    Args:
        model: a Transformers or PEFT model.
        checkpointing: gradient checkpointing of its layers.

    Raises:
        ModelError: Liger is not installed.
    """
    try:
        patch, types = compat.liger_patcher()
    except ImportError:
        raise ModelError(
            "Liger is not installed", where="train.liger", repair="pip install 'finray[liger]', or set it to auto"
        ) from None
    inner = without_adapter(model)
    restore()
    if inner.config.model_type in types:
        module = sys.modules[type(inner).__module__]
        usual = dict(vars(module))
        # Its rotary embedding changes queries and keys in place, unseen by autograd: selective checkpointing, which
        # stores them before that, would rotate them a second time.
        without = {"rope": False} if checkpointing == "selective" else {}
        # Of some families Liger knows only the language model, and not a classifier.
        with suppress(TypeError):
            patch(inner, **_NOT_ITS_LOSS, **without)
        replaced = {name: original for name, original in usual.items() if getattr(module, name) is not original}
        _REPLACED[module.__name__] = replaced
        for name, original in replaced.items():
            setattr(module, name, original if isinstance(original, type) else _on_gpus(getattr(module, name), original))


def restore() -> None:
    """Give Transformers' modules their own functions back: what was patched before loses Liger's rotary embedding."""
    for module, names in _REPLACED.items():
        for name, original in names.items():
            setattr(sys.modules[module], name, original)
    _REPLACED.clear()


def _on_gpus(kernel: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the kernel where its first tensor is on a GPU, else the usual function."""

    @functools.wraps(usual)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (kernel if x.is_cuda else usual)(x, *args, **kwargs)

    return call
