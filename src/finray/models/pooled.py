"""The last layer of an encoder whose head reads only some of the tokens.

The other tokens of the last layer are needed as keys and values, and for nothing after them. So everything after its
attention is computed for the tokens that the head reads: in a model of six layers, a seventh less arithmetic.
"""

from __future__ import annotations

import types
from typing import Any

import torch

# Transformers' layers with the forward pass that `_forward` repeats: attention, then `attention.output` with the
# residual sum, then the feed-forward part. All other layers compute all tokens.
_KINDS = ("BertLayer", "CamembertLayer", "ElectraLayer", "RobertaLayer", "XLMRobertaLayer")


def read_only_some(body: Any) -> bool:
    """Have the last layer of an encoder take ``read_positions_K``; returns whether it does."""
    layers = getattr(getattr(body, "encoder", None), "layer", None)
    if not isinstance(layers, torch.nn.ModuleList) or type(layers[-1]).__name__ not in _KINDS or body.config.is_decoder:
        return False
    layers[-1].forward = types.MethodType(_forward, layers[-1])
    return True


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *others: Any,
    read_positions_K: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The layer's outputs (1, K, H) at the given positions, or all of them."""
    output: torch.Tensor
    if read_positions_K is None:
        output = type(self).forward(self, hidden_states, attention_mask, *others, **kwargs)
        return output
    attention = self.attention
    # The others belong to decoders.
    attended, _ = attention.self(hidden_states, attention_mask, **kwargs)
    taken = (one.index_select(1, read_positions_K) for one in (attended, hidden_states))
    output = self.feed_forward_chunk(attention.output(*taken))
    return output
