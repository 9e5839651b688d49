"""Layers that carry a state from token to token, inside a pass over packed rows.

A gated delta net, Mamba, a short convolution or lightning attention runs through a sequence and hands on what it has
seen. Over packed rows it would hand it on from one row to the next. If all that a layer calls for this is known to
:mod:`finray.models.scans`, or is a kernel that takes packed rows, the layer's forward pass runs once, with these
functions. Any other layer gets the rows apart, and its outputs are joined again; everything around it stays packed.
Only rows of one length share a batch: on a CPU these layers take at least as long for padding as for tokens.

Which layers these are follows from what they do: they keep a state in Transformers' cache, or convolve over tokens.
Whether that was all is found out by the small model of :mod:`finray.models.packing_check`, as for any other model.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch

from finray import compat
from finray.models import attention, scans

# What a forward pass calls to keep a state for the next token: methods of Transformers' caches.
_KEEPS_STATE = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
# The rows of the pass that runs, for layers that their model does not tell: in some it hands nothing on.
_ROWS: ContextVar[Any] = ContextVar("finray_rows", default=None)
# What says where rows begin and end. A row alone needs none of it, and Transformers' layers refuse it without a kernel.
_OF_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

# Mamba 2 works in chunks, and fills the last one of each row. Without its kernel it takes time by the square of a
# chunk, so that shorter ones than a model names are faster; they change no more than the order of sums.
_CHUNK = 32


def separate(body: Any, *, on_cpu: bool) -> None:
    """Have the layers of a model that carry a state take rows apart, in a pass that says where they end.

    In a pass without ``segment_lengths``, and outside of :func:`of_rows`, they compute what they always did.
    """
    for module in stateful(body):
        if on_cpu and isinstance(chunk := getattr(module, "chunk_size", None), int):
            module.chunk_size = min(chunk, _CHUNK)  # type: ignore[assignment]
        # Checkpointing may be around it already.
        if getattr(inspect.unwrap(module.forward), "__func__", None) is not _forward:
            take_apart(module, _forward)


def take_apart(module: Any, forward: Callable[..., Any]) -> None:
    """Give a module a forward pass that takes rows apart."""
    module.forward = types.MethodType(forward, module)
    module.__dict__["finray_apart"] = True


def stateful(body: Any) -> list[torch.nn.Module]:
    """The outermost modules of a model that themselves carry a state from token to token."""
    layers: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in body.modules():
        if id(module) not in inside and _carries_state(module):
            layers.append(module)
            inside |= {id(part) for part in module.modules()}
    return layers


def read_alone(body: Any) -> set[str]:
    """Names of layers in a model whose matrix is read by one that carries a state, or by its kernel, without calling
    them: an adapter on them would do nothing (`dt_proj` of Mamba)."""
    names = set[str]()
    mixers = {id(module) for module in stateful(body)}
    for path, module in body.named_modules():
        if id(module) in mixers:
            # Transformers' own code is there; what comes with a model may not be.
            with suppress(OSError, TypeError):
                code = inspect.getsource(type(module))
                names |= {f"{path}.{name}" for name in re.findall(r"self\.(\w+)\.weight\b(?!\.)", code)}
    return names


@contextmanager
def of_rows(segment_lengths: Any) -> Iterator[None]:
    """Within it a pass is over these rows; None for no packed ones."""
    token = _ROWS.set(segment_lengths)
    try:
        yield
    finally:
        _ROWS.reset(token)


def rows_of_pass() -> Any:
    """The rows of the pass that runs: their lengths, or what :mod:`finray.models.by_row` knows of them."""
    rows = _ROWS.get()
    return rows.lengths if isinstance(rows, attention.RowLengths) else rows


def kept_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for when it is computed again: after its pass, maybe in another thread."""
    rows = _ROWS.get()

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with of_rows(rows):
            return forward(*args, **kwargs)

    return run


def not_compiled(module: Any) -> None:
    """Keep what takes rows apart out of compiled code, which would be made anew for each combination of lengths."""
    for part in module.modules():
        if "finray_apart" in part.__dict__:
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]


def _carries_state(module: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and _KEEPS_STATE.intersection(code.co_names):
        return True
    # A convolution of each channel by itself that reaches back: the parts of Mamba and its relatives.
    return any(
        isinstance(part, torch.nn.Conv1d) and part.groups == part.in_channels and part.padding == (_reach(part),)
        for part in module.children()
    )


def _reach(convolution: torch.nn.Conv1d) -> int:
    """Tokens before its own that a causal convolution sees; -1 if none."""
    return convolution.kernel_size[0] - 1 or -1


def _forward(
    self: Any,
    *args: Any,
    segment_lengths: tuple[int, ...] | attention.RowLengths | attention.Layout | None = None,
    **kwargs: Any,
) -> Any:
    """As the module's own, for packed rows (1, T, H) as for each row alone."""
    forward = type(self).forward
    segment_lengths = _ROWS.get() if segment_lengths is None else segment_lengths
    if segment_lengths is None:
        return forward(self, *args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_ROWS}
    lengths = segment_lengths.lengths if isinstance(segment_lengths, attention.RowLengths) else segment_lengths
    if not isinstance(lengths, tuple | list):
        raise RuntimeError(f"{type(self).__name__} carries a state, which cached keys and values do not hold")
    layer: Any = type(self)
    if (packed := _for_packed_rows(layer)) is not None:
        with of_rows(tuple(lengths)):
            return packed(self, *args, **kwargs)
    if len(lengths) == 1:
        return forward(self, *args, **kwargs)
    batches = rows_by_length(lengths)
    split_args = [split(value, lengths, batches) for value in args]
    split_kwargs = {name: split(value, lengths, batches) for name, value in kwargs.items()}
    outputs = [
        forward(self, *(value[at] for value in split_args), **{name: value[at] for name, value in split_kwargs.items()})
        for at in range(len(batches))
    ]
    return joined(outputs, batches)


@functools.cache
def _for_packed_rows(layer: Any) -> Callable[..., Any] | None:
    """A layer's forward pass that calls functions for packed rows; None if it calls one that has none."""
    forward: Any = inspect.unwrap(layer.forward)
    replaced = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        kernel, is_there = compat.kernel_of(function)
        if kernel is None or kernel in scans.OF_ONE_TOKEN:
            continue
        if kernel not in scans.PACKED:
            return None
        replaced[name] = functools.partial(_by_rows, scans.PACKED[kernel], function if is_there else None)
    if not replaced:
        return None
    names = forward.__globals__ | replaced
    copy = types.FunctionType(forward.__code__, names, closure=forward.__closure__, argdefs=forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _by_rows(packed: Callable[..., Any], kernel: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The kernel, if there is one, given where rows begin; else the function that is given their lengths."""
    lengths, device = _ROWS.get(), args[0].device
    if kernel is None or device.type != "cuda":
        return packed(lengths, *args, **kwargs)
    counts = torch.tensor([0, *lengths], device=device)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    numbers = rows.repeat_interleave(counts[1:], output_size=sum(lengths))
    return kernel(*args, **kwargs | {"cu_seqlens": counts.cumsum(0), "seq_idx": numbers[None]})


def rows_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of one length, which are computed together."""
    alike: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        alike.setdefault(length, []).append(row)
    return list(alike.values())


def split(value: Any, lengths: Sequence[int], batches: list[list[int]]) -> Sequence[Any]:
    """An argument for each batch: what has a place for each token (1, T, ...) becomes (S, L, ...)."""
    if isinstance(value, tuple):
        return list(zip(*(split(part, lengths, batches) for part in value), strict=True)) or [()] * len(batches)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, sum(lengths)):
        return [value] * len(batches)
    rows = torch.split(value[0], list(lengths))
    return [torch.stack([rows[row] for row in batch]) for batch in batches]


def joined(outputs: Sequence[Any], batches: list[list[int]]) -> Any:
    """The outputs of batches as that of packed rows."""
    if isinstance(outputs[0], tuple):
        return tuple(joined(list(parts), batches) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor):
        return outputs[0]
    rows: dict[int, torch.Tensor] = {}
    for batch, output in zip(batches, outputs, strict=True):
        rows |= dict(zip(batch, output.unbind(), strict=True))
    return torch.cat([rows[row] for row in range(len(rows))])[None]
