"""Attention over packed rows, registered with Transformers as ``finray_packed``.

A forward pass sees one sequence of T tokens that consists of S rows. On a GPU it uses torch's variable-length
attention; on a CPU finray's own kernel (:mod:`finray.models.cpu_kernels`). Where neither supports what the model needs,
or the CPU, rows are computed one by one, or in batches of about one length if they are many and short. Either way no
score between two rows is ever computed, so nothing can leak from one example into the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray import compat
from finray.models import cpu_kernels
from finray.models.dropout import drop

NAME = "finray_packed"
# Arguments that Transformers' models pass to any attention and that have no effect here. Any other argument may change
# the result (biases by distance), so a model that passes one is not packed.
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
        "first_tokens_S",
        "return_dict",
        "use_cache",
    }
)
# On a CPU in bf16 plain matrix products are faster than torch's fused kernel. Up to this row length, their weights are
# kept for the backward pass; those of longer causal rows are computed again, for so many queries at a time.
EXPLICIT_UP_TO, QUERIES = 512, 128
# On a CPU, rows up to this length are batched, if a pass has at least this many of them.
BATCHED_UP_TO, BATCHED_FROM = 128, 16
# The kernel of some CPUs takes rows from this length on, on average: it rounds their lengths up to multiples of 48.
KERNEL_FROM = 32
# Batched rows are padded to multiples of these, within attention.
LENGTHS_OF, COUNTS_OF = 16, 4


class RowLengths:
    """Tokens per row, in an object that is opaque to the compiler, which would recompile for each value; and the masks
    that layers of a pass have made, for those that follow."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.masks: dict[tuple[Any, ...], torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class Scores:
    """Settings of a layer's scores: scaling, window to each side (including the token itself), softcap, causality, and
    sinks (H): a score of each head that takes its share of every softmax, and has no value (gpt-oss)."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: torch.Tensor | None = None


class Layout(Protocol):
    """Other arrangements of rows: with cached keys and values of earlier tokens, or after a common prefix."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Attention of a layer; the layers of a forward pass call it in order.

        Args:
            query: (1, H, T, D).
            key: (1, H_kv, T, D).
            value: (1, H_kv, T, D).
            scores: score settings.

        Returns:
            (1, T, H, D).
        """


def register(function: Callable[..., Any] | None = None) -> None:
    """Register ``attn_implementation="finray_packed"`` with Transformers, as :func:`packed_attention` or another
    function.

    No mask function is registered: without one, Transformers builds no mask, and none is needed.
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
    s_aux: torch.Tensor | None = None,
    segment_lengths: tuple[int, ...] | RowLengths | Layout | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each row: causal, or bidirectional if the module is not causal (encoders).

    Args:
        module: the attention module; it is causal unless its ``is_causal`` says otherwise.
        query: (1, H, T, D); or (1, H, S, D) if only the first token of each row asks, without causality and window.
        key: (1, H_kv, T, D) with H a multiple of H_kv.
        value: (1, H_kv, T, D).
        attention_mask: must be None; row lengths define the rows.
        scaling: scaling factor of the scores; None means ``D ** -0.5``.
        dropout: probability of dropping a score, in training.
        sliding_window: maximum tokens that a token sees to each visible side, including itself.
        softcap: scores are capped to ``softcap * tanh(score / softcap)`` (Gemma 2).
        s_aux: sinks, a score for each head.
        segment_lengths: tokens per row, adding up to T; or a layout that computes attention.
        cu_seq_lens_q: int32 cumulative lengths, S + 1 entries, on the device.
        max_length_q: length of the longest row.
        is_causal: overrides the module.
        others: arguments without effect on the result.

    Returns:
        (1, T, H, D) or (1, S, H, D), and None.

    Raises:
        RuntimeError: the model did not pass the row lengths to its attention, or needs something unsupported.
    """
    if segment_lengths is None:
        raise RuntimeError(f"{type(module).__name__} does not pass row lengths to its attention")
    if attention_mask is not None:
        raise RuntimeError(f"{type(module).__name__} builds its own attention mask, which packed rows cannot use")
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if s_aux is not None and softcap is not None:
        unknown.append("s_aux` with `softcap")
    if unknown:
        raise RuntimeError(
            f"{type(module).__name__} uses `{unknown[0]}` in its attention, which packed rows do not support"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings may have upcast queries and keys; values keep the projection's dtype.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not isinstance(segment_lengths, tuple | list | RowLengths):
        return segment_lengths.attend(query, key, value, Scores(scaling, sliding_window, softcap, sinks=s_aux)), None
    varlen = _varlen() if query.is_cuda else None
    fits = (
        query.dtype in (torch.bfloat16, torch.float16)
        and not dropout
        and softcap is None
        and query.shape[-1] <= 256
        and value.shape[-1] <= query.shape[-1]
    )
    if varlen is not None and fits and cu_seq_lens_q is not None and max_length_q is not None:
        kernel, takes_groups = varlen
        before = sliding_window - 1 if sliding_window else -1
        options: dict[str, Any] = {"scale": scaling, "window_size": (before, 0 if causal else before)}
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and takes_groups:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        cu_queries, most = cu_seq_lens_q, max_length_q
        if query.shape[2] != key.shape[2]:
            cu_queries, most = torch.arange(len(cu_seq_lens_q), dtype=torch.int32, device=query.device), 1
        # The kernel wants values of the width of keys.
        narrower, width = query.shape[-1] - value.shape[-1], value.shape[-1]
        value = F.pad(value, (0, narrower)) if narrower else value
        flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        bounds = (cu_queries, cu_seq_lens_q, most, max_length_q)
        if s_aux is None:
            attended = kernel(*flat, *bounds, **options)
        else:
            attended = _VarlenWithSinks.apply(*flat, s_aux, kernel, bounds, options)  # type: ignore[no-untyped-call]
        return attended[None, ..., :width], None
    rows = segment_lengths if isinstance(segment_lengths, RowLengths) else RowLengths(tuple(segment_lengths))
    return _attend_to_rows(
        query, key, value, rows, Scores(scaling, sliding_window, softcap, causal, s_aux), dropout
    ), None


def _attend_to_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: RowLengths,
    scores: Scores,
    dropout: float,
) -> torch.Tensor:
    """Attention within each row: (1, T, H, D). Many short rows are batched with others of about their length."""
    lengths, options = segments.lengths, dict[str, Any](dropout=dropout, masks=segments.masks)
    are_short = sum(lengths) < KERNEL_FROM * len(lengths)
    plain = not dropout and scores.softcap is None
    if plain and not are_short and cpu_kernels.fits(query, key, value):
        how: dict[str, Any] = {"scaling": scores.scaling, "window": scores.window, "causal": scores.causal}
        return cpu_kernels.attend(query, key, value, lengths, sinks=scores.sinks, **how)
    first_only = query.shape[2] != key.shape[2]
    if sum(length <= BATCHED_UP_TO for length in lengths) < BATCHED_FROM:
        # Split, not sliced: the gradients of slices are full-sized tensors, added up one by one.
        queries = torch.split(query, 1 if first_only else list(lengths), dim=2)
        keys, values = torch.split(key, list(lengths), dim=2), torch.split(value, list(lengths), dim=2)
        each = zip(queries, keys, values, strict=True)
        return torch.cat([attend(q, k, v, scores, **options).transpose(1, 2) for q, k, v in each], dim=1)
    batches, heads, width = _batches(lengths), query.shape[1], value.shape[-1]
    # By number of heads, of which keys and values may have fewer.
    slots = {count: torch.from_numpy(_slots(lengths, count)).to(query.device) for count in {heads, key.shape[1]}}
    if first_only:
        in_order = np.concatenate([batch.rows for batch in batches])
        by_row = query[0].transpose(0, 1)[in_order, :, None]
        asking = torch.split(by_row, [len(batch.rows) for batch in batches])
    else:
        asking = tuple(_padded(query, batches, slots[heads]))
    padded, outputs = [_padded(tensor, batches, slots[tensor.shape[1]]) for tensor in (key, value)], []
    for (rows, length), q, k, v in zip(batches, asking, *padded, strict=True):
        row_lengths = [lengths[row] for row in rows]
        attended = attend(q, k, v, scores, lengths=row_lengths if min(row_lengths) < length else None, **options)
        outputs.append(attended.flatten(0, 2))
    packed: torch.Tensor = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if first_only:
        _, at = np.unique(in_order, return_index=True)
        return packed.view(1, -1, heads, width)[:, torch.from_numpy(at)]
    packed = without_padding(packed, slots[heads][len(packed) :])
    return packed.view(1, -1, heads, width)


class _RowBatch(NamedTuple):
    """Rows that are padded to one length; to make up their number, some come twice."""

    rows: list[int]
    length: int


def _batches(lengths: Sequence[int]) -> list[_RowBatch]:
    """Rows in batches of one length, after rounding up. Short lengths and counts are rounded because oneDNN compiles a
    matrix product anew for each shape, which takes ten times as long as a small product itself."""
    if len(set(lengths)) == 1:
        return [_RowBatch([*range(len(lengths))], lengths[0])]
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(_up(length, LENGTHS_OF) if length <= BATCHED_UP_TO else length, []).append(row)
    return [
        _RowBatch([some[at % len(some)] for at in range(_up(len(some), COUNTS_OF))], length)
        if length <= BATCHED_UP_TO
        else _RowBatch(some, length)
        for length, some in rows.items()
    ]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@lru_cache(maxsize=8)  # All layers of a forward pass ask for the same.
def _slots(lengths: tuple[int, ...], heads: int) -> npt.NDArray[np.int64]:
    """How heads of tokens (T * H) become the batches (S, H, L), one after the other: what each slot takes; after these,
    the slot of each head of a token. Padding takes the last token of its row, so that it is finite."""
    starts, at_H = np.cumsum(lengths) - lengths, np.arange(heads)
    taken = []
    for rows, length in _batches(lengths):
        within_SL = np.minimum(np.arange(length), np.take(lengths, rows)[:, None] - 1)
        tokens_SL = starts[rows][:, None] + within_SL
        taken.append((tokens_SL[:, None] * heads + at_H[:, None]).ravel())
    everything = np.concatenate(taken)
    slots = np.empty(sum(lengths) * heads, dtype=np.int64)
    # What is taken more than once is in the first of its slots: NumPy assigns the last value.
    slots[everything[::-1]] = np.arange(len(everything))[::-1]
    return np.concatenate([everything, slots])


def _padded(tensor_1HTD: torch.Tensor, batches: Sequence[_RowBatch], slots: torch.Tensor) -> list[torch.Tensor]:
    """Rows in their batches (S, H, L, D), as matrix products take them."""
    _, heads, tokens, width = tensor_1HTD.shape
    taken, places = torch.split(slots, [len(slots) - tokens * heads, tokens * heads])
    flat = with_padding(tensor_1HTD[0].transpose(0, 1).reshape(-1, width), taken, places)
    parts = torch.split(flat, [len(rows) * heads * length for rows, length in batches])
    return [part.view(len(rows), heads, length, width) for part, (rows, length) in zip(parts, batches, strict=True)]


def with_padding(tensor: torch.Tensor, taken: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``tensor[taken]``, whose gradient is that of the ``slots``: padding has none, so that nothing is added up."""
    result: torch.Tensor = _Padded.apply(tensor, taken, slots)  # type: ignore[no-untyped-call]
    return result


def without_padding(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``tensor[slots]`` for slots that differ: the gradient is copied to them, where torch's would be added up."""
    result: torch.Tensor = _Unpadded.apply(tensor, slots)  # type: ignore[no-untyped-call]
    return result


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, taken: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return tensor.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _Unpadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(tensor)
        return tensor.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, slots, grad), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    *,
    dropout: float = 0.0,
    lengths: Sequence[int] | None = None,
    masks: dict[tuple[Any, ...], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention for rows of one length, or padded to one; queries are the last tokens.

    Args:
        query: (S, H, L, D).
        key: (S, H_kv, L + earlier tokens, D).
        value: like key.
        scores: score settings.
        dropout: probability of dropping a score.
        lengths: tokens of each row, if some are padded at the end.
        masks: masks of earlier layers, to which this layer's is added.

    Returns:
        (S, H, L, D), finite for padding.
    """
    scaling, window, softcap, causal = scores.scaling, scores.window, scores.softcap, scores.causal
    # A causal row ends before its padding.
    lengths = None if causal else lengths
    length, total = query.shape[2], key.shape[2]
    windowed = window is not None and window < total
    # Products would keep the scores of long rows that are not causal.
    by_products = length > 1 and query.dtype == torch.bfloat16 and (causal or total <= EXPLICIT_UP_TO)
    # With dropout, torch has no fused kernel on a CPU.
    if scores.sinks is not None or ((dropout or by_products) and softcap is None and not query.is_cuda):
        if total > EXPLICIT_UP_TO and causal and not dropout:
            blocked: torch.Tensor = _ByBlocks.apply(query, key, value, scores.sinks, scores)  # type: ignore[no-untyped-call]
            return blocked
        reach, groups = window if windowed else None, query.shape[1] // key.shape[1]
        kind = (length, total, causal, reach, tuple(lengths or ()), groups, key.shape[1], query.dtype)
        hidden = None if masks is None else masks.get(kind)
        if hidden is None:
            visible = None
            if causal or windowed or lengths is not None:
                visible = _visible(query, total, causal=causal, window=reach, lengths=lengths)
            hidden = _hidden(query, key, visible)
            if masks is not None:
                masks[kind] = hidden
        return _attend_explicitly(query, key, value, scaling, hidden, sinks=scores.sinks, dropout=dropout)
    grouped = query.shape[1] != key.shape[1]
    if softcap is None and not windowed and lengths is None and length in (1, total):
        past = causal and length == total
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=past, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    visible = _visible(query, total, causal=causal, window=window if windowed else None, lengths=lengths)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    products = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    products = (torch.tanh(products / softcap) * softcap).masked_fill(~visible, float("-inf"))
    weights = drop(products.float().softmax(-1).to(query.dtype), dropout)
    return weights @ value.repeat_interleave(groups, 1)


def _visible(
    query: torch.Tensor,
    total: int,
    *,
    causal: bool,
    window: int | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Which keys a query sees: (L, total), or (S, 1, L or 1, total) for padded rows, whose padding is not seen. In a
    window, padding sees all: it may have no token in its reach."""
    steps = torch.arange(total, device=query.device)
    distance = steps[total - query.shape[2] :, None] - steps
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible &= distance.abs() < window
    if lengths is None:
        return visible
    is_token = (steps < torch.tensor(lengths, device=query.device)[:, None])[:, None]
    if window is None:
        return is_token[:, :, None]
    return visible & is_token[:, :, None] | ~is_token[..., None]


def _hidden(query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """What is added to scores (S * H_kv, H / H_kv * L, total) to hide what is not visible."""
    if visible is None:
        return query.new_zeros(1, 1)
    hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    if hidden.shape[-2] > 1:
        hidden = hidden.repeat(*(1 for _ in hidden.shape[:-2]), query.shape[1] // key.shape[1], 1)
    return hidden.expand(-1, key.shape[1], -1, -1).flatten(0, 1) if hidden.ndim == 4 else hidden


def _attend_explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    hidden: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of short rows, or with sinks or dropout, by plain matrix products; heads that share keys share one."""
    rows, heads, length, width = query.shape
    shared = rows * key.shape[1]
    groups = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    total = key.shape[2]
    grouped = query.reshape(shared, groups * length, width)
    keys, values = key.reshape(shared, total, width), value.reshape(shared, total, value.shape[-1])
    # One name, so that scores are freed before a dropout mask is drawn.
    weights = torch.baddbmm(hidden.expand(shared, groups * length, -1), grouped, keys.transpose(1, 2), alpha=scale)
    # torch sums a bf16 softmax in fp32 and rounds once; requesting fp32 would store two more copies for the backward.
    if sinks is None:
        weights = torch.softmax(weights, dim=-1)
    else:
        weights, _ = _softmax_with_sinks(weights, sinks, rows, groups)
    weights = drop(weights, dropout)
    return torch.bmm(weights, values).view(rows, heads, length, value.shape[-1])


class _ByBlocks(torch.autograd.Function):
    """Causal attention of long rows, of which nothing (L, L) is kept: a block of queries after the other meets the keys
    that it sees, and does so again in the backward pass. Heads that share keys share a product."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, scores: Scores
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.scores = scores
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        for block, weights, _, seen in _ByBlocks.weights(query, key, sinks, scores):
            out[:, :, block] = torch.bmm(weights, value.flatten(0, 1)[:, seen]).view_as(out[:, :, block])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        rows, shared, scores = query.shape[0], key.shape[1], ctx.scores
        scale = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
        # Each key's gradient is a sum over blocks.
        exact = torch.promote_types(key.dtype, torch.float32)
        of_query, of_sinks = torch.empty_like(query), None if sinks is None else torch.zeros_like(sinks)
        of_key, of_value = (torch.zeros_like(each.flatten(0, 1), dtype=exact) for each in (key, value))
        for block, weights, of_sink, seen in _ByBlocks.weights(query, key, sinks, scores):
            given = grad[:, :, block].reshape(rows * shared, -1, value.shape[-1])
            of_value[:, seen] += torch.bmm(weights.transpose(1, 2), given)
            of_weights = torch.bmm(given, value.flatten(0, 1)[:, seen].transpose(1, 2))
            if of_sinks is not None:
                sums = (of_weights * weights).sum(-1, keepdim=True)
                of_sinks -= (of_sink * sums).view(rows, len(sinks), -1).sum((0, 2))
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_query[:, :, block] = torch.bmm(of_scores, key.flatten(0, 1)[:, seen]).view_as(query[:, :, block])
            asked = query[:, :, block].reshape(rows * shared, -1, query.shape[-1])
            of_key[:, seen] += torch.bmm(of_scores.transpose(1, 2), asked)
        of_key, of_value = of_key.mul_(scale).to(key.dtype).view_as(key), of_value.to(value.dtype).view_as(value)
        return of_query.mul_(scale), of_key, of_value, of_sinks, None

    @staticmethod
    def weights(query: torch.Tensor, key: torch.Tensor, sinks: Any, scores: Scores) -> Iterator[tuple[Any, ...]]:
        """A block of queries, its weights (S * H_kv, H / H_kv * block, keys), those of sinks, and the keys."""
        (rows, shared, total, width), length = key.shape, query.shape[2]
        keys, groups = key.flatten(0, 1), query.shape[1] // shared
        scale = width**-0.5 if scores.scaling is None else scores.scaling
        for start in range(0, length, QUERIES):
            block = slice(start, min(start + QUERIES, length))
            asked = query[:, :, block].reshape(rows * shared, -1, width)
            size, end = block.stop - start, total - length + block.stop
            seen = slice(0 if scores.window is None else max(0, end - size - scores.window + 1), end)
            products = torch.baddbmm(asked.new_zeros(1), asked, keys[:, seen].transpose(1, 2), beta=0, alpha=scale)
            # Without a window only the last keys are not seen by all.
            apart = size if scores.window is None else end - seen.start
            visible = _visible(asked[:, None, :size], apart, causal=True, window=scores.window)
            hidden = torch.zeros_like(visible, dtype=asked.dtype).masked_fill_(~visible, float("-inf"))
            products.view(rows * shared, groups, size, -1)[..., -apart:] += hidden
            if sinks is None:
                yield block, torch.softmax(products, dim=-1), None, seen
            else:
                weights, of_sinks = _softmax_with_sinks(products, sinks, rows, groups)
                yield block, weights.contiguous(), of_sinks, seen


def _softmax_with_sinks(
    scores: torch.Tensor, sinks_H: torch.Tensor, rows: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over scores (rows * H_kv, groups * L, total) and the sink of their head, which comes apart."""
    length = scores.shape[1] // groups
    column = sinks_H.to(scores.dtype).view(1, -1, groups, 1).expand(rows, -1, -1, length).reshape(*scores.shape[:2], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1:]


class _VarlenWithSinks(torch.autograd.Function):
    """Variable-length attention with a sink for each head.

    The sink adds to the sum of a softmax alone. So outputs shrink by its share; and the kernel's backward pass, which
    computes the probabilities from their sum, is given the sum with the sink in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        kernel: Callable[..., Any],
        bounds: tuple[Any, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        attended, logsum_HT = kernel(*(query, key, value), *bounds, return_aux=compat.varlen_logsum(), **options)
        with_sink_HT = torch.logaddexp(logsum_HT, sinks.float()[:, None])
        out_THD: torch.Tensor = attended * (logsum_HT - with_sink_HT).exp().t()[..., None].to(attended.dtype)
        ctx.save_for_backward(query, key, value, sinks, out_THD, with_sink_HT, *bounds[:2])
        ctx.longest, ctx.options = bounds[2:], options
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out_THD, with_sink_HT, *bounds = ctx.saved_tensors
        gradients = compat.varlen_backward(
            grad, query, key, value, out_THD, with_sink_HT, (bounds[0], bounds[1], *ctx.longest), ctx.options
        )
        shares_HT = (sinks.float()[:, None] - with_sink_HT).exp()
        of_sinks = -(shares_HT * (grad.float() * out_THD.float()).sum(-1).t()).sum(1)
        return *gradients, of_sinks.to(sinks.dtype), None, None, None


@lru_cache(maxsize=1)
def _varlen() -> tuple[Any, bool] | None:
    """torch's variable-length attention, and whether it supports grouped-query heads; None if torch is too old."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in parameters) if {"window_size", "scale"} <= parameters.keys() else None
