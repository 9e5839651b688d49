"""What a forward pass keeps for the backward pass, in bytes, from shapes alone.

It follows the code that keeps it: ``models/fused_lora.py`` keeps an adapted layer's input once, and the layers of a
block that read the same tensor share it; ``models/attention.py`` attends to each row alone, and on a CPU keeps the
attention weights of short rows; norms of Llama's kind work in fp32. `tests/unit/planning/test_activations.py` compares
with what autograd really keeps, for several families of models.
"""

from __future__ import annotations

from finray.models.attention import EXPLICIT_UP_TO
from finray.planning.blueprint import Block, Blueprint
from finray.planning.setup import FP32, Setup, Workload

# Elements kept per element that an activation reads; more where Python operations make it up.
_ACTIVATIONS = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 3, "relu2": 2}


def kept_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """Everything that is kept for the backward pass, after the forward pass."""
    outside = _final_bytes(blueprint, setup, work)
    if setup.checkpointing:
        # Each layer's input, in the dtype of the residual stream.
        inputs = blueprint.layers * blueprint.hidden * _stream(blueprint, setup) * work.tokens
        return inputs + outside + (product_bytes(blueprint, setup, work) if setup.selective else 0)
    return layer_bytes(blueprint, setup, work) + outside


def product_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """What selective checkpointing keeps beside that: outputs of linear layers (and LoRA's narrow ones), attention."""
    total = 0.0
    for block in blueprint.blocks:
        widths = sum(linear.outputs + (blueprint.rank if linear.adapted else 0) for linear in block.linears)
        widths += block.query if block.kind == "attention" else 0
        total += block.count * setup.element * widths * work.tokens
    return total


def layer_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """What all decoder layers keep without checkpointing: norms, linear inputs, attention, feed-forward."""
    total = 0.0
    for norms in blueprint.norms:
        total += norms.count * norms.width * _norm_element(blueprint, setup, composed=norms.composed) * work.tokens
    for block in blueprint.blocks:
        kept = _linear_inputs(blueprint, setup, block) * work.tokens
        if block.kind == "attention":
            kept += attention_bytes(blueprint, setup, block, work.rows)
        else:
            kept += _feed_forward(blueprint, setup, block) * work.tokens
        total += block.count * kept
    return total


def _stream(blueprint: Blueprint, setup: Setup) -> int:
    """Bytes of an element of the residual stream: fp32 where embeddings are trained, else as stored."""
    return FP32 if blueprint.adapter == 0 and not setup.computes_with_copies else setup.element


def _norm_element(blueprint: Blueprint, setup: Setup, *, composed: bool) -> int:
    """A composed norm keeps its input in fp32, and what its own weight is multiplied with if that is trained."""
    stream = _stream(blueprint, setup)
    if not composed:
        return stream
    return FP32 + (stream if blueprint.adapter == 0 else 0)


def _linear_inputs(blueprint: Blueprint, setup: Setup, block: Block) -> float:
    """Bytes per token of the inputs that a block's trained or adapted layers keep, and of LoRA's narrow products."""
    trained = blueprint.adapter == 0
    element = setup.element
    reading = [linear for linear in block.inlets if trained or linear.adapted]
    # Autocast casts an fp32 input for each layer anew; dropout draws anew for each.
    apart = setup.dropout or (trained and setup.precision == "bf16" and _stream(blueprint, setup) == FP32)
    widths = [linear.inputs for linear in reading]
    total = element * (sum(widths) if apart else max(widths, default=0))
    if trained or block.outlet.adapted:
        total += element * block.outlet.inputs
    adapted = [linear for linear in block.linears if linear.adapted]
    total += element * blueprint.rank * len(adapted)
    # The mask of a dropout: what was multiplied with on a CPU, a byte on a GPU.
    mask = 1 if setup.device == "cuda" else element
    return total + (mask * sum(linear.inputs for linear in adapted) if setup.dropout else 0)


def attention_bytes(blueprint: Blueprint, setup: Setup, block: Block, rows: tuple[int, ...]) -> float:
    """What the attention of one layer keeps for rows of the given lengths: see ``models/attention.py``."""
    tokens, element = sum(rows), setup.element
    kept = float(element * block.opened * tokens)
    squares = blueprint.heads * sum(length**2 for length in rows)
    if blueprint.softcap:
        # Capped scores, their fp32 softmax and its rounded copy; keys and values once per query head; a mask per row.
        scores = FP32 + element + (element if element != FP32 else 0)
        return scores * squares + 3 * element * block.query * tokens + squares / blueprint.heads
    if setup.device == "cuda":
        # The output is the next layer's input, which keeps it; beside it a row statistic per head.
        return kept + FP32 * blueprint.heads * tokens
    short = [length for length in rows if setup.precision == "bf16" and _is_explicit(blueprint, length)]
    fused = tokens - sum(short)
    # Short rows keep their attention weights; the fused kernel keeps its output and a statistic.
    kept += element * blueprint.heads * sum(length**2 for length in short)
    kept += (element * block.query + FP32 * blueprint.heads) * fused
    if blueprint.window is not None:
        kept += element * sum(length**2 for length in rows if length > blueprint.window)
    return kept


def _is_explicit(blueprint: Blueprint, length: int) -> bool:
    return length <= EXPLICIT_UP_TO and blueprint.window is None


def _feed_forward(blueprint: Blueprint, setup: Setup, block: Block) -> float:
    """Bytes per token: what the activation reads, and for a gate also both factors of the product."""
    if block.gated:
        return setup.element * (block.opened + block.outlet.inputs)
    return setup.element * block.opened * _ACTIVATIONS.get(blueprint.activation, 1)


def _final_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """After the last layer: the norm's input, the hidden states at labelled positions, and their gradient."""
    norm = _norm_element(blueprint, setup, composed=blueprint.final_norm_is_composed) * blueprint.hidden * work.tokens
    picked = (_stream(blueprint, setup) + setup.element) * blueprint.hidden * work.targets
    return norm + picked


def widest_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """Gradients of one layer's activations that are there at the same time: those around its widest block."""
    widest = max((block.opened + block.outlet.inputs for block in blueprint.blocks), default=blueprint.hidden)
    return setup.element * widest * work.tokens
