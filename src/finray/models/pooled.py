"""The last layer of an encoder whose head reads only the first token of each row.

The other tokens of the last layer are needed as keys and values, and for nothing else. So its queries, and everything
after its attention, are computed for the first tokens only: in a model of six layers, a seventh less arithmetic.
"""

from __future__ import annotations

import types
from typing import Any

import torch

# Transformers' layers with the forward pass that `_forward` repeats: attention, then `attention.output` with the
# residual sum, then the feed-forward part. The heads of all these models read first tokens. Other layers compute all.
_KINDS = ("BertLayer", "CamembertLayer", "ElectraLayer", "RobertaLayer", "XLMRobertaLayer")


def read_only_first(body: Any) -> bool:
    """Have the last layer of an encoder take ``first_tokens_S``; returns whether it does."""
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
    first_tokens_S: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The layer's outputs (1, S, H) for the first token of each row, given their positions, or for all tokens."""
    output: torch.Tensor
    if first_tokens_S is None:
        output = type(self).forward(self, hidden_states, attention_mask, *others, **kwargs)
        return output
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The other arguments belong to decoders.
    layer, first = self.attention.self, hidden_states.index_select(1, first_tokens_S)
    query, key, value = (
        project(states).unflatten(-1, (layer.num_attention_heads, layer.attention_head_size)).transpose(1, 2)
        for project, states in ((layer.query, first), (layer.key, hidden_states), (layer.value, hidden_states))
    )
    attend = ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation]
    dropout = layer.dropout.p if self.training else 0.0
    attended, _ = attend(layer, query, key, value, attention_mask, dropout=dropout, scaling=layer.scaling, **kwargs)
    output = self.feed_forward_chunk(self.attention.output(attended.flatten(2), first))
    return output
