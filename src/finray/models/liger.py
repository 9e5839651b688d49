"""Liger's kernels for norms, rotary embeddings and gated feed-forward layers."""

from __future__ import annotations

from typing import Any

from finray import compat
from finray.errors import ModelError
from finray.models.saved_layout import without_adapter

# finray's loss computes logits only at targets, which Liger's does not.
_NOT_ITS_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply(model: Any) -> None:
    """Patch a model with Liger's layers; a model family that Liger does not support is unchanged.

    Raises:
        ModelError: Liger is not installed.
    """
    try:
        patch, known = compat.liger_patcher()
    except ImportError:
        raise ModelError(
            "Liger is not installed", where="train.liger", repair="pip install 'finray[liger]', or set it to auto"
        ) from None
    inner = without_adapter(model)
    if inner.config.model_type in known:
        patch(inner, **_NOT_ITS_LOSS)
