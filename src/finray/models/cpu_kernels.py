"""Attention over packed rows in bf16 on CPUs with AVX-512 BF16, compiled from `cpu_kernels.c` where a C compiler is.

The compiled file is kept in the user's cache. Where there is none, attention is products of torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from finray.config.paths import cache_dir
from finray.hardware import KERNEL_FEATURES, c_compiler, missing_for_kernels

SOURCE = Path(__file__).with_suffix(".c")
# No more than they need, so that machines of a shared cache can differ.
_FLAGS = ("-O3", "-mfma", *(f"-m{name}" for name in KERNEL_FEATURES.values()), "-fopenmp", "-shared", "-fPIC")
WIDEST = 256
# A window that hides nothing.
_ALL = 2**40
_COMPILING_S = 120.0
_TO_BASE_2 = math.log2(math.e)

_log = logging.getLogger(__name__)


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token", ctypes.c_long), ("head", ctypes.c_long))

    @classmethod
    def of(cls, tensor_THD: torch.Tensor) -> _Tensor:
        return cls(tensor_THD.data_ptr(), tensor_THD.stride(0), tensor_THD.stride(1))


class _Call(ctypes.Structure):
    _fields_ = (
        *(
            (name, _Tensor)
            for name in ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value")
        ),
        ("logsumexp", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("lengths", ctypes.POINTER(ctypes.c_long)),
        *((name, ctypes.c_long) for name in ("rows", "tokens", "heads", "kv_heads", "width", "window")),
        *((name, ctypes.c_long) for name in ("causal", "threads")),
        ("scale", ctypes.c_float),
    )


@functools.cache
def library() -> Any:
    """The compiled kernels; None where there are none."""
    if missing_for_kernels() is not None:
        return None
    failure: Exception | None = None
    with tempfile.TemporaryDirectory() as private:
        for folder in (cache_dir("kernels"), Path(private)):
            try:
                return ctypes.CDLL(str(_compiled(folder)))
            except (OSError, subprocess.SubprocessError) as error:
                failure = error
    # With torch's products everything works, more slowly.
    said = getattr(failure, "stderr", None) or failure
    _log.info("attention on this CPU is torch's, because its own kernel could not be compiled: %s", said)
    return None


def _compiled(folder: Path) -> Path:
    """The compiled file in a folder, made unless it is there.

    Raises:
        OSError: the folder cannot be written.
        PermissionError: others can write there: what is in it is not run.
        CalledProcessError: the compiler failed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    file = folder / f"{name}.so"
    if not file.exists():
        # Several workers of a machine may do this at once: each makes its own, and the last stays.
        with tempfile.TemporaryDirectory(dir=folder) as made:
            command = [*c_compiler(), *_FLAGS, str(SOURCE), "-o", f"{made}/{name}.so", "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING_S)
            compiled = Path(made, f"{name}.so")
            compiled.chmod(0o700)
            compiled.replace(file)
    for path in (folder, file):
        found = path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can change {path}")
    return file


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels can compute attention of these (1, H, T, D) here."""
    shape, width = key.shape, query.shape[-1]
    same = query.shape[2] == shape[2] and value.shape == shape and width == shape[-1]
    dense = query.dtype == torch.bfloat16 and query.device.type == "cpu" and len(query) == 1
    return same and dense and width % 16 == 0 and width <= WIDEST and library() is not None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    scaling: float | None = None,
    window: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention within each row (FlashAttention-2, Dao 2023), if it :func:`fits`.

    Args:
        query: (1, H, T, D), bf16.
        key: (1, H_kv, T, D) with H a multiple of H_kv.
        value: like key.
        lengths: tokens of each row, adding up to T.
        scaling: factor of the scores; None means ``D ** -0.5``.
        window: most tokens that a token sees to each visible side, including itself; None means all.
        causal: whether a token sees those before it only.
        sinks: (H,) scores that take their share of every softmax.

    Returns:
        (1, T, H, D).

    Raises:
        ValueError: lengths or heads do not fit the tensors; the kernels would read what is beside them.
    """
    if sum(lengths) != query.shape[2] or min(lengths) < 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"rows of {sum(lengths)} tokens, in queries {list(query.shape)} and keys {list(key.shape)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    visible = _ALL if window is None else window
    out_THD: torch.Tensor = _attention(*parts, sinks, list(lengths), scale, visible, causal)[0]
    return out_THD[None]


@torch.library.custom_op("finray::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    lengths: list[int],
    scale: float,
    window: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H, D), and the logarithms to base 2 of the sums of each softmax, (H, T) in fp32."""
    tensors = {"query": _dense(query), "key": _dense(key), "value": _dense(value)}
    tensors["out"] = torch.empty(query.shape, dtype=query.dtype)
    logsumexp_HT = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    sinks_H = None if sinks is None else sinks.detach().float().contiguous()
    _call(library().finray_attention, tensors, sinks_H, logsumexp_HT, lengths, scale, window, causal)
    return tensors["out"], logsumexp_HT


@_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _width = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("finray::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    tensors = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out}
    tensors = {name: _dense(tensor) for name, tensor in tensors.items()}
    gradients = [torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value)]
    tensors |= dict(zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True))
    _call(library().finray_attention_backward, tensors, None, logsumexp, lengths, scale, window, causal)
    return gradients[0], gradients[1], gradients[2]


@_attention_backward.register_fake
def _(
    grad_out: torch.Tensor,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, sinks, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_logsumexp: None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG001
    query, key, value, sinks, out, logsumexp_HT = ctx.saved_tensors
    gradients = _attention_backward(grad_out, query, key, value, out, logsumexp_HT, *ctx.how)
    grad_sinks = None
    if sinks is not None:
        shares_HT = torch.exp2(sinks.float()[:, None] * _TO_BASE_2 - logsumexp_HT)
        grad_sinks = -(shares_HT * (grad_out.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)
    return *gradients, grad_sinks, None, None, None, None


_attention.register_autograd(_backward, setup_context=_keep)


def _dense(tensor_THD: torch.Tensor) -> torch.Tensor:
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()


def _call(
    function: Any,
    tensors: dict[str, torch.Tensor],
    sinks_H: torch.Tensor | None,
    logsumexp_HT: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    causal: bool,
) -> None:
    tokens, heads, width = tensors["query"].shape
    call = _Call(
        **{name: _Tensor.of(tensor) for name, tensor in tensors.items()},
        logsumexp=logsumexp_HT.data_ptr(),
        sinks=None if sinks_H is None else sinks_H.data_ptr(),
        lengths=(ctypes.c_long * len(lengths))(*lengths),
        **{"rows": len(lengths), "tokens": tokens, "heads": heads, "kv_heads": tensors["key"].shape[1], "width": width},
        **{"window": window, "causal": causal, "threads": torch.get_num_threads(), "scale": scale},
    )
    function(ctypes.byref(call))
