"""What hands a state from token to token, over packed rows: convolutions, gated delta rules and Mamba 2.

Rows are cut into chunks that begin where a row begins. What happens within a chunk is computed for all chunks of all
rows at once; only the state goes from chunk to chunk, for all rows together that have one more. (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length" and "Gated Delta Networks"; Dao and Gu
2024, "Transformers are SSMs".)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from finray.models.attention import with_padding, without_padding

# Tokens of a chunk: more of them make fewer turns, and more products within a chunk that are masked.
SIZE = 32


class _Chunks(NamedTuple):
    """Rows as N chunks in the order of a scan: the first of every row, then the second of those that have one, ...

    Rows with most chunks come first, so that each turn goes on with the first states of the turn before.
    """

    turns: list[int]  # chunks of each turn
    taken: npt.NDArray[np.int64]  # (N * H * C): the head of a token in each place; padding takes the last of its row
    places: npt.NDArray[np.int64]  # (T * H): the place of each
    is_token: npt.NDArray[np.bool_]  # (N, 1, C, 1)


@lru_cache(maxsize=8)  # All layers of a forward pass ask for the same.
def _chunks(lengths: tuple[int, ...], size: int, heads: int) -> _Chunks:
    lengths_S = np.array(lengths)
    starts_S, chunks_S = np.cumsum(lengths_S) - lengths_S, -(-lengths_S // size)
    order = np.argsort(-chunks_S, kind="stable")
    turns = [order[: np.count_nonzero(chunks_S > turn)] for turn in range(max(chunks_S))]
    rows_N1, counts = np.concatenate(turns)[:, None], [len(rows) for rows in turns]
    within_NC = np.repeat(np.arange(len(turns)), counts)[:, None] * size + np.arange(size)
    tokens_NC = starts_S[rows_N1] + np.minimum(within_NC, lengths_S[rows_N1] - 1)
    taken_NHC = tokens_NC[:, None] * heads + np.arange(heads)[:, None]
    is_token = (within_NC < lengths_S[rows_N1])[:, None]
    places = np.empty(sum(lengths) * heads, dtype=np.int64)
    is_taken = np.broadcast_to(is_token, taken_NHC.shape)
    places[taken_NHC[is_taken]] = np.flatnonzero(is_taken)
    return _Chunks(counts, taken_NHC.ravel(), places, is_token[..., None])


def scan(
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """``S = exp(decay) S + k v'`` and ``o = q S`` within each row, from a state of zeros.

    Args:
        lengths: tokens per row, adding up to T.
        query: (T, H_k, K).
        key: like query.
        value: (T, H, V), with H a multiple of H_k.
        decay: (T, H), at most 0; or one for each of a key's channels, (T, H, K), where H is H_k.
        beta: (T, H) for a delta rule, in which ``v' = beta (v - k S)``; else ``v' = v``.

    Returns:
        (T, H, V).
    """
    (tokens, heads, width), shared = value.shape, key.shape[1]
    groups = heads // shared
    turns, *indices = _chunks(tuple(lengths), SIZE, shared)
    taken, places, is_token = (torch.from_numpy(each).to(value.device, non_blocking=True) for each in indices)

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """(N, H_k, C, ...)."""
        flat = with_padding(tensor.reshape(tokens * shared, -1), taken, places)
        return flat.view(len(is_token), shared, SIZE, -1)

    def of_state(keys: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Keys (n, H_k, C, K) and states (n, H_k, K, G, V), or the other way round."""
        products = keys @ state.flatten(3)
        return products.view(*products.shape[:-1], groups, width)

    q, k, v = chunked(query), chunked(key), chunked(value).view(-1, shared, SIZE, groups, width)
    # Padding changes no state: it neither decays it nor adds to it.
    logs = (chunked(decay) * is_token).cumsum(2)
    grown, shrunk, last = logs.exp(), (logs[:, :, -1:] - logs).exp(), logs[:, :, -1:].exp()
    later = torch.ones(SIZE, SIZE, dtype=torch.bool, device=value.device).triu(1)
    # How much of each value a token reads within its chunk (N, H_k, G, C, C), and where it writes.
    if decay.ndim == 3:
        apart = (logs[:, :, :, None] - logs[:, :, None]).masked_fill(later[..., None], float("-inf")).exp()
        within, overlap = ((by[:, :, :, None] * k[:, :, None] * apart).sum(-1)[:, :, None] for by in (q, k))
        q, reader, writer, last = q * grown, k * grown, k * shrunk, last.transpose(2, 3)[..., None]
        grown = shrunk = logs.new_ones(len(is_token), 1, 1, 1, 1)
    else:
        groups_first = logs.transpose(2, 3)
        apart = (groups_first[..., None] - groups_first[..., None, :]).masked_fill(later, float("-inf")).exp()
        within, overlap = ((by @ k.transpose(2, 3))[:, :, None] * apart for by in (q, k))
        reader, writer, grown, shrunk, last = k, k, grown[..., None], shrunk[..., None], last[..., None]
    parts = [q, writer.transpose(2, 3), v, grown, shrunk, last]
    if beta is not None:
        rates = (chunked(beta) * is_token)[..., None]
        parts += [reader, rates, _Inverse.apply(overlap * rates.transpose(2, 3))]  # type: ignore[no-untyped-call]
    state, values, read = None, [], []
    for turn, (q, writer, v, grown, shrunk, last, *delta) in enumerate(
        zip(*(torch.split(part, turns) for part in parts), strict=True)
    ):
        read.append(torch.zeros_like(v) if state is None else of_state(q, state) * grown)
        if delta:
            reader, rates, inverse = delta
            v = _mixed(inverse, rates * (v if state is None else v - of_state(reader, state) * grown))
        values.append(v)
        if more := sum(turns[turn + 1 : turn + 2]):
            added = of_state(writer[:more], v[:more] * shrunk[:more])
            state = added if state is None else (state * last)[:more] + added
    out = (_mixed(within, torch.cat(values)) + torch.cat(read)).flatten(3)
    return without_padding(out.flatten(0, 2), places).view(tokens, heads, width)


def _mixed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values (n, H_k, C, G, V) by weights (n, H_k, G, C, C)."""
    return (weights @ values.transpose(2, 3)).transpose(2, 3)


class _Inverse(torch.autograd.Function):
    """Of unit lower triangular matrices; their diagonals, and what is above, are not read."""

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor) -> torch.Tensor:
        one = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
        inverse: torch.Tensor = torch.linalg.solve_triangular(matrices, one, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        gradient: torch.Tensor = transposed @ grad @ transposed
        return gradient.neg_().tril_(-1)


def gated_delta_rule(
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As fla's ``chunk_gated_delta_rule`` or ``chunk_kda`` of packed rows (1, T, H, D), in fp32."""
    dtype = query.dtype
    query, key, value, g, beta = (tensor[0].float() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    return scan(lengths, query * query.shape[-1] ** -0.5, key, value, g, beta)[None].to(dtype), None


def mamba_2(
    lengths: Sequence[int],
    values: torch.Tensor,
    dt: torch.Tensor,
    rates_H: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> torch.Tensor:
    """As mamba_ssm's ``mamba_chunk_scan_combined`` of packed rows (1, T, H, D), in fp32."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    values, keys, queries = (tensor[0].float() for tensor in (values, keys, queries))
    out = scan(lengths, queries, keys, values * dt[..., None], rates_H.float() * dt)
    return (out if D is None else out + D[:, None] * values)[None]


def convolution(
    lengths: Sequence[int],
    hidden_1CT: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """As causal_conv1d's ``causal_conv1d_fn`` of packed rows (1, C, T)."""
    from transformers.activations import ACT2FN

    out: torch.Tensor = _Convolution.apply(hidden_1CT[0].t(), weight, bias, tuple(lengths))  # type: ignore[no-untyped-call]
    return (out if activation is None else ACT2FN[activation](out)).t()[None]


@lru_cache(maxsize=8)
def _places(lengths: tuple[int, ...], reach: int) -> npt.NDArray[np.int64]:
    """Where each token is (T) if every row comes after so many places that are empty."""
    return np.arange(sum(lengths)) + np.repeat(np.arange(1, len(lengths) + 1) * reach, lengths)


class _Convolution(torch.autograd.Function):
    """Of hidden states (T, C) over the tokens of each row before, by weights (C, K), in fp32: a product for each of K
    distances, over all rows with empty places between them. oneDNN would compile a kernel for each length."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        reach = weight.shape[-1] - 1
        places = torch.from_numpy(_places(lengths, reach)).to(hidden.device, non_blocking=True)
        ctx.save_for_backward(hidden, weight, places)
        ctx.size, ctx.bias = sum(lengths) + reach * (len(lengths) - 1), None if bias is None else bias.dtype
        apart, by = _Convolution.apart(hidden, places, ctx.size + 2 * reach), weight.to(_exact(hidden))
        out = apart[reach : reach + ctx.size] * by[:, reach]
        for back in range(reach):
            out.addcmul_(apart[back : back + ctx.size], by[:, back])
        out = out.index_select(0, places - reach)
        return (out if bias is None else out.add_(bias)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, places = ctx.saved_tensors
        size, reach = ctx.size, weight.shape[-1] - 1
        apart, grads = (_Convolution.apart(each, places, size + 2 * reach) for each in (hidden, grad))
        by, of_weight = weight.to(apart.dtype), torch.empty_like(weight, dtype=apart.dtype)
        of_hidden = grads[reach : reach + size] * by[:, reach]
        for back in range(reach):
            of_hidden.addcmul_(grads[2 * reach - back :][:size], by[:, back])
        for back in range(reach + 1):
            of_weight[:, back] = (apart[back : back + size] * grads[reach : reach + size]).sum(0)
        of_bias = None if ctx.bias is None else grad.sum(0, dtype=apart.dtype).to(ctx.bias)
        return of_hidden.index_select(0, places - reach).to(hidden.dtype), of_weight.to(weight.dtype), of_bias, None

    @staticmethod
    def apart(tensor: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        """In their places of so many."""
        return tensor.new_zeros(count, tensor.shape[1], dtype=_exact(tensor)).index_copy_(
            0, places, tensor.to(_exact(tensor))
        )


def _exact(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# By the kernel that a function of Transformers stands for: the same for packed rows, given their lengths first.
PACKED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
    "mamba_chunk_scan_combined": mamba_2,
    # Returns nothing where there is no kernel, and the layer calls the ones above.
    "mamba_split_conv1d_scan_combined": lambda *_, **__: None,
}
# What layers call for one token more, in generation.
OF_ONE_TOKEN = frozenset(
    {"causal_conv1d_update", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "selective_state_update"}
)
