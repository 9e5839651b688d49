"""Liger's kernels for what finray has none of its own for: norms, rotary embeddings, gated feed-forward layers."""

from __future__ import annotations

from typing import Any

from finray import compat
from finray.errors import ModelError

# finray's loss makes logits only where there is a label, which Liger's does not.
_NOT_ITS_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply(model: Any) -> None:
    """Give a model Liger's layers; a family that Liger does not know keeps its own.

    Raises:
        ModelError: Liger is not installed.
    """
    try:
        patch, known = compat.liger_patcher()
    except ImportError:
        raise ModelError(
            "Liger is not installed", where="train.liger", repair="pip install 'finray[liger]', or set it to auto"
        ) from None
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if inner.config.model_type in known:
        patch(inner, **_NOT_ITS_LOSS)
