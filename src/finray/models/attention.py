"""Attention over rows laid end to end, registered with Transformers as ``finray_packed``.

A forward pass sees one sequence of T tokens that is really S rows. On a GPU torch's variable-length attention does
the work; on a CPU, and wherever that kernel cannot express what the model asks for, each row is attended to alone.
Either way no score between two rows is ever computed, so nothing can leak from one example into the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.nn import functional as F

NAME = "finray_packed"
# What Transformers' models hand down to any attention and what changes nothing here. Whatever else they hand down may
# change the result (attention sinks, biases by distance), so a model that does so is not packed.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "deterministic",
        "max_length_k",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
# On a CPU in bf16, rows up to this length are faster by plain matrix products than by the fused kernel.
EXPLICIT_UP_TO = 512


class RowLengths:
    """Tokens per row, in an object that a compiler hands on without looking into it: it would compile anew for each."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer's scores are made: factor, tokens that one sees to a side (itself included), cap, the past alone."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    causal: bool = True


class Layout(Protocol):
    """Rows that are laid out in another way: beside keys and values of earlier tokens, or after a common beginning."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Attention of a layer; the layers of a forward pass ask in turn.

        Args:
            query: (1, H, T, D).
            key: (1, H_kv, T, D).
            value: (1, H_kv, T, D).
            scores: how they are made.

        Returns:
            (1, T, H, D).
        """


def register(function: Callable[..., Any] | None = None) -> None:
    """Make ``attn_implementation="finray_packed"`` known to Transformers, as :func:`packed_attention` or another.

    It is not registered as a mask: without an entry there, Transformers builds none, and this function needs none.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, function or packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segment_lengths: tuple[int, ...] | RowLengths | Layout | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each row: causal, or in both directions where the module is not causal (encoders).

    Args:
        module: the attention module; it is causal unless its ``is_causal`` says otherwise.
        query: (1, H, T, D).
        key: (1, H_kv, T, D) with H a multiple of H_kv.
        value: (1, H_kv, T, D).
        attention_mask: must be None; rows are told by their lengths.
        scaling: factor of the scores; ``D ** -0.5`` when None.
        dropout: probability of dropping a score, in training.
        sliding_window: a token sees at most this many tokens to each side that it sees, itself included.
        softcap: scores are capped to ``softcap * tanh(score / softcap)`` (Gemma 2).
        segment_lengths: tokens per row, adding up to T; or a layout that attends by itself.
        cu_seq_lens_q: int32 cumulative lengths, S + 1 entries, on the device.
        max_length_q: the longest row.
        is_causal: overrides the module.
        others: anything without effect on the result.

    Returns:
        (1, T, H, D) and None.

    Raises:
        RuntimeError: the model did not hand the row lengths down to its attention, or wants what this cannot compute.
    """
    if segment_lengths is None:
        raise RuntimeError(f"{type(module).__name__} does not pass row lengths on to its attention")
    if attention_mask is not None:
        raise RuntimeError(f"{type(module).__name__} builds a mask of its own, which packed rows cannot honour")
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise RuntimeError(
            f"{type(module).__name__} wants `{unknown[0]}` in its attention, which packed rows cannot have"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings may have widened queries and keys; values are as the projection left them.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not isinstance(segment_lengths, tuple | list | RowLengths):
        return segment_lengths.attend(query, key, value, Scores(scaling, sliding_window, softcap)), None
    varlen = _varlen() if query.is_cuda else None
    fits = query.dtype in (torch.bfloat16, torch.float16) and not dropout and softcap is None and query.shape[-1] <= 256
    if varlen is not None and fits and cu_seq_lens_q is not None and max_length_q is not None:
        kernel, takes_groups = varlen
        before = sliding_window - 1 if sliding_window else -1
        options: dict[str, Any] = {"scale": scaling, "window_size": (before, 0 if causal else before)}
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and takes_groups:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return kernel(*flat, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)[None], None
    lengths = segment_lengths.lengths if isinstance(segment_lengths, RowLengths) else segment_lengths
    # Split, not sliced: the gradients of slices are full-sized tensors, added up one by one.
    rows = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    scores = Scores(scaling, sliding_window, softcap, causal)
    outputs = [attend(q, k, v, scores, dropout=dropout).transpose(1, 2) for q, k, v in rows]
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]).contiguous(), None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, *, dropout: float = 0.0
) -> torch.Tensor:
    """Attention of one row, whose queries are its last tokens.

    Args:
        query: (1, H, L, D).
        key: (1, H_kv, L + earlier tokens, D).
        value: like key.
        scores: how they are made.
        dropout: probability of dropping a score.

    Returns:
        (1, H, L, D).
    """
    scaling, window, softcap, causal = scores.scaling, scores.window, scores.softcap, scores.causal
    length, total = query.shape[2], key.shape[2]
    short = length == total <= EXPLICIT_UP_TO and query.dtype == torch.bfloat16 and not query.is_cuda
    if short and softcap is None and window is None and not dropout:
        return _attend_explicitly(query, key, value, scaling, causal=causal)
    windowed = window is not None and window < total
    grouped = query.shape[1] != key.shape[1]
    if softcap is None and not windowed and length in (1, total):
        past = causal and length == total
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=past, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    steps = torch.arange(total, device=query.device)
    distance = steps[total - length :, None] - steps
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if windowed and window is not None:
        visible &= distance.abs() < window
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    products = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    products = (torch.tanh(products / softcap) * softcap).masked_fill(~visible, float("-inf"))
    weights = F.dropout(products.float().softmax(-1).to(query.dtype), p=dropout)
    return weights @ value.repeat_interleave(groups, 1)


def _attend_explicitly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> torch.Tensor:
    """Attention of one short row by three matrix products; heads that share keys are one product."""
    _, heads, length, width = query.shape
    shared = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    grouped = query.reshape(shared, heads // shared * length, width)
    hidden = torch.zeros(1, 1, dtype=query.dtype)
    if causal:
        hidden = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1).repeat(heads // shared, 1)
    scores = torch.baddbmm(hidden.expand(shared, -1, -1), grouped, key[0].transpose(1, 2), alpha=scale)
    # torch sums a bf16 softmax in fp32 and rounds once; asking for fp32 would keep two more copies for the backward.
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, value[0]).view(1, heads, length, width)


@lru_cache(maxsize=1)
def _varlen() -> tuple[Any, bool] | None:
    """torch's variable-length attention, and whether it takes heads that share keys; None where it is too old."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if {"window_size", "scale"} <= known.keys() else None
