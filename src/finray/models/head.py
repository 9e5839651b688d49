"""The language-model head and its loss, computed only at targets, in chunks.

For K targets and a vocabulary of V the logits would take 4·K·V bytes, and their gradient as much again: with 128 k
words more than the rest of the model. Here the loss and the gradient of each chunk are computed together and its logits
freed, at no extra floating-point work (the softmax gradient is ``p - onehot``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from finray.hardware import cpu_has_bf16
from finray.models.reordered import ReorderedLinear, linear

# Elements of one chunk of logits: on a CPU 48 MiB in fp32, far below the activations, and enough rows to keep the cores
# busy. A GPU reads all weights once for each chunk, and needs more rows before that is little beside its arithmetic.
CHUNK_ELEMENTS = {"cpu": 3 * 2**22, "cuda": 2**26}
CHUNK_ROWS = 64
# A GPU multiplies tiles of 128 or 256 rows: of 270 it would compute 384.
TILE_ROWS = 256
# Elements that a CPU adds at a time if dtypes differ.
_ADDED = 2**19


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits.

    Attributes:
        weight_VH: projection.
        bias_V: added to the logits, or None.
        scale: factor of the logits (Cohere, Granite).
        softcap: logits are capped to ``softcap * tanh(logits / softcap)`` (Gemma 2), or None.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """Logits (K, V) in fp32."""
        weight = self.weight_VH if self.weight_VH.is_mkldnn else self.weight_VH.to(hidden_KH.dtype)
        bias = None if self.bias_V is None else self.bias_V.to(weight.dtype)
        logits = linear(hidden_KH, weight, bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def chunk_rows(vocabulary: int, device: str) -> int:
    """Rows of one chunk of logits on a type of device."""
    rows = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // vocabulary
    return max(TILE_ROWS, round(rows / TILE_ROWS) * TILE_ROWS) if device == "cuda" else max(CHUNK_ROWS, rows)


def plain_head(model: Any) -> Head | None:
    """The head of a Transformers causal LM, or None when it is more than a projection (adapted, or wrapped)."""
    layer = model.get_output_embeddings()
    if type(layer) not in (torch.nn.Linear, ReorderedLinear):
        return None
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, scale, None if softcap is None else float(softcap))


def loss_sum(head: Head, hidden_KH: torch.Tensor, targets_K: torch.Tensor, *, chunk: int | None = None) -> torch.Tensor:
    """Cross-entropy summed over K targets (fp32 scalar, in nats).

    Args:
        head: the projection.
        hidden_KH: hidden states at the labelled positions.
        targets_K: int64 targets.
        chunk: positions per chunk; None chooses by the vocabulary.
    """
    return _applied(_ChunkedLoss, head, hidden_KH, targets_K, chunk)


def _applied(
    function: type[torch.autograd.Function],
    head: Head,
    hidden_KH: torch.Tensor,
    targets_K: torch.Tensor,
    chunk: int | None,
) -> torch.Tensor:
    """A function of the head's logits, in the dtype of autocast."""
    device = hidden_KH.device.type
    chunk = chunk or chunk_rows(head.weight_VH.shape[0], device)
    if torch.is_autocast_enabled(device):
        hidden_KH = hidden_KH.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        result: torch.Tensor = function.apply(  # type: ignore[no-untyped-call]
            hidden_KH, head.weight_VH, head.bias_V, targets_K, head, chunk, torch.is_grad_enabled()
        )
    return result


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass; the backward pass only scales the stored gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_K: torch.Tensor,
        head: Head,
        chunk: int,
        trains: bool,
    ) -> torch.Tensor:
        # Under `no_grad`, `needs_input_grad` is still true of a weight that is trained.
        needs = [trains and needed for needed in ctx.needs_input_grad]
        total, ctx.gradients = _in_chunks(head, hidden_KH, weight_VH, bias_V, targets_K, chunk, needs)
        ctx.dtypes = (weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were freed by its first backward pass")
        # Scaled in place, because nothing else uses them: a head's gradient is the largest tensor of a step, and
        # autograd makes it the parameter's gradient without a copy.
        hidden, weight, bias = (None if gradient is None else gradient.mul_(grad_output) for gradient in ctx.gradients)
        ctx.gradients = None
        return (
            hidden,
            None if weight is None else weight.to(ctx.dtypes[0]),
            None if bias is None else bias.to(ctx.dtypes[1]),
            None,
            None,
            None,
            None,
        )


def _in_chunks(
    head: Head,
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_K: torch.Tensor,
    chunk: int,
    needs: Sequence[bool],
    scale_K1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The summed loss, and its gradients with respect to hidden states, weights and bias, of those that ``needs``
    names; with ``scale_K1`` those of losses that are scaled by it."""
    weight = weight_VH.to(hidden_KH.dtype)
    head = replace(head, weight_VH=weight, bias_V=bias_V)  # else each chunk has a copy of its own
    total = torch.zeros((), dtype=torch.float32, device=hidden_KH.device)
    grad_hidden = torch.empty_like(hidden_KH) if needs[0] else None
    grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs[1] else None
    grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needs[2] else None
    for start in range(0, len(targets_K), chunk):
        span = slice(start, start + chunk)
        hidden, targets = hidden_KH[span], targets_K[span, None]
        losses, grad = _losses_and_grad(head, hidden, targets, trains=any(needs[:3]))
        total += losses.sum()
        if grad is None:
            continue
        if scale_K1 is not None:
            grad *= scale_K1[span]
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        low = _lowered(grad, hidden.dtype)
        if grad_hidden is not None:
            torch.mm(low, weight, out=grad_hidden[span])
        if grad_weight is not None and low.dtype == grad_weight.dtype:
            # Without a temporary for the product.
            grad_weight.addmm_(low.T, hidden)
        elif grad_weight is not None:
            _add(grad_weight, low.T @ hidden)
        # Before the next chunk's logits are made.
        del grad, low
    return total, [grad_hidden, grad_weight, grad_bias]


def log_probabilities(
    head: Head, hidden_KH: torch.Tensor, targets_K: torch.Tensor, *, chunk: int | None = None
) -> torch.Tensor:
    """The log-probability of each of K targets (fp32, K, in nats). Arguments are those of :func:`loss_sum`."""
    return _applied(_ChunkedLogProbabilities, head, hidden_KH, targets_K, chunk)


class _ChunkedLogProbabilities(torch.autograd.Function):
    """The gradient of a hidden state is that of its own log-probability, scaled: it is computed with it, as for the
    loss. Those of weights and bias are sums over all, so a head that is trained computes its logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_K: torch.Tensor,
        head: Head,
        chunk: int,
        trains: bool,
    ) -> torch.Tensor:
        needs = [trains and needed for needed in ctx.needs_input_grad]
        ctx.again = any(needs[1:3])
        weight = weight_VH.to(hidden_KH.dtype)
        head = replace(head, weight_VH=weight)
        losses_K1 = torch.empty(len(targets_K), 1, dtype=torch.float32, device=hidden_KH.device)
        kept = torch.empty_like(hidden_KH) if needs[0] and not ctx.again else None
        for start in range(0, len(targets_K), chunk):
            span = slice(start, start + chunk)
            losses, grad = _losses_and_grad(head, hidden_KH[span], targets_K[span, None], trains=kept is not None)
            losses_K1[span] = losses
            if grad is not None and kept is not None:
                torch.mm(_lowered(grad, kept.dtype), weight, out=kept[span])
            del grad
        ctx.settings = replace(head, weight_VH=weight[:0], bias_V=None), chunk
        ctx.save_for_backward(*((hidden_KH, weight_VH, bias_V, targets_K) if ctx.again else (kept,)))
        return -losses_K1[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.again:
            (kept,) = ctx.saved_tensors
            # In fp32, in which a product with a bf16 tensor is taken before it is rounded.
            hidden = None if kept is None else (kept * -grad_output[:, None]).to(kept.dtype)
            return hidden, None, None, None, None, None, None
        hidden_KH, weight_VH, bias_V, targets_K = ctx.saved_tensors
        head, chunk = ctx.settings
        saved, needs = (hidden_KH, weight_VH, bias_V, targets_K), ctx.needs_input_grad
        _, (hidden, weight, bias) = _in_chunks(head, *saved, chunk, needs, -grad_output[:, None])
        return (
            hidden,
            None if weight is None else weight.to(weight_VH.dtype),
            None if bias is None or bias_V is None else bias.to(bias_V.dtype),
            *(None, None, None, None),
        )


def _losses_and_grad(
    head: Head, hidden_KH: torch.Tensor, targets_K1: torch.Tensor, *, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of a chunk (K, 1), and the gradient of their sum with respect to the projection (fp32); None unless it
    trains."""
    logits = head.logits(hidden_KH)
    slope = None if head.softcap is None or not trains else 1 - (logits / head.softcap) ** 2
    if logits.is_cuda:
        # One pass over memory instead of five.
        logits = torch.log_softmax(logits, dim=-1)
        losses = -logits.gather(1, targets_K1)
        if not trains:
            return losses, None
        grad = logits.exp_()
    else:
        # In place: on a CPU a second tensor of this size would cost more than the arithmetic.
        logits -= logits.amax(dim=-1, keepdim=True)
        chosen = logits.gather(1, targets_K1)
        grad = logits.exp_()
        norm = grad.sum(dim=-1, keepdim=True)
        losses = norm.log() - chosen
        if not trains:
            return losses, None
        grad /= norm
    grad.scatter_add_(1, targets_K1, torch.full_like(targets_K1, -1, dtype=grad.dtype))
    if slope is not None:
        grad *= slope
    if head.scale != 1.0:
        grad *= head.scale
    return losses, grad


def _lowered(grad_KV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in another dtype, stored by columns on a CPU without bf16 instructions: torch multiplies that with
    the weights a hundred times as fast as one stored by rows."""
    if grad_KV.dtype == dtype or grad_KV.device.type != "cpu" or cpu_has_bf16():
        return grad_KV.to(dtype)
    return grad_KV.T.to(dtype, memory_format=torch.contiguous_format).T


def _add(total: torch.Tensor, product: torch.Tensor) -> None:
    """Add a product to a matrix of another dtype: on a CPU, torch first copies its whole operand to the matrix's
    dtype."""
    rows = max(1, _ADDED // total.shape[1]) if total.device.type == "cpu" else len(total)
    for start in range(0, len(total), rows):
        total[start : start + rows].add_(product[start : start + rows])
