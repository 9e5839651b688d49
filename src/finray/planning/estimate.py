"""Peak memory of one training worker, worked out from shapes alone.

Every part is a formula over a :class:`Blueprint`, a :class:`Setup` and a :class:`Workload`; nothing is fitted to a
model. Memory rises and falls within a step, so the formulas are added up for each of its moments, and the largest sum
is the estimate. `benchmarks/memory.py` holds it against measured peaks.

The formulas follow the code: ``training/activations.py`` says what is kept for the backward pass, ``models/head.py``
makes logits a chunk at a time, ``parallel/ddp.py`` sums gradients in flat copies of all of them, and
``training/optimizer.py`` has two fp32 moments per trained parameter, or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from finray.models.head import CHUNK_ELEMENTS, CHUNK_ROWS
from finray.planning.activations import kept_bytes, layer_bytes, widest_bytes
from finray.planning.blueprint import Blueprint
from finray.planning.setup import FP32, Setup, Workload

MIB = 2**20
# Resident memory of a worker that has imported everything and done its first step on a model of no size, measured with
# torch 2.13 on Linux (x86-64): Python, torch, Transformers, PEFT, TensorBoard.
PROCESS = 450 * MIB
# What a Ray worker has beside that, measured in the same way.
RAY_WORKER = 85 * MIB
# A fast tokenizer's tables, per entry of the vocabulary.
TOKENIZER_ENTRY = 680
# CUDA context and kernels; not in what torch's allocator counts.
CUDA_CONTEXT = 600 * MIB
# oneDNN keeps the code it generates for each shape of a bf16 product on a CPU: so many at most, of about so much each.
KERNEL_CACHE = 1024
KERNEL = 600 * 1024
# Products of different shapes in the attention of one row, forward and backward (models/attention.py, explicit path).
KERNELS_PER_ROW = 6
# A heap that keeps freed memory (training/memory.py) has holes that the next tensors do not fit into. glibc 2.36 cuts a
# few bytes off around every aligned tensor; its per-thread cache holds on to these pieces, so that a freed tensor does
# not join its neighbours, and even one of the same size does not fit again. Measured as a share of what comes and
# goes in a step: 0.35 to 0.9, and more in long runs of many shapes; 0.1 to 0.4 with that cache switched off
# (glibc.malloc.tcache_count=0).
HEAP_HOLES = 0.6
HEAP_HOLES_WITHOUT_CACHE = 0.28
# torch's CUDA allocator rounds blocks up and splits them; with expandable segments little is lost.
CUDA_HOLES = 0.03
# Scales of quantised storage, in bits a weight: for 4 bits (NF4, double quantisation) a byte per 64 weights and four
# per 64 * 256, for 8 bits an fp32 number per row, of some hundred to some thousand weights.
BITS_OVERHEAD = {4: 8 / 64 + 32 / (64 * 256), 8: 0.03}
# DeepSpeed's default sizes, in elements: of its buckets, of the gathered weights that ZeRO-3 keeps for later use, and
# of what ZeRO-3 updates at a time.
ZERO_BUCKET = 500_000_000
ZERO_LIVE = 1_000_000_000
ZERO_GROUP = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """The peak of a worker.

    Attributes:
        parts: bytes by part, in the phase that has the peak.
        phase: that phase.
        phases: total bytes by phase.
    """

    parts: Mapping[str, int]
    phase: str
    phases: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Bytes without the process itself and the holes: what an allocator hands out."""
        return self.total - self.parts.get("process", 0) - self.parts.get("heap holes", 0)


def estimate(blueprint: Blueprint, setup: Setup, work: Workload) -> Estimate:
    """The peak memory of a worker, by part.

    Args:
        blueprint: the model with its adapter.
        setup: how it is trained.
        work: the largest micro-batch.
    """
    passing = {
        "load": _load(setup),
        "forward": _forward(blueprint, setup, work),
        "backward": _backward(blueprint, setup, work),
        "recompute": _recompute(blueprint, setup, work),
        "reduce": _reduce(blueprint, setup),
    }
    kept = _state(blueprint, setup, work)
    whole = {}
    for name, parts in passing.items():
        # Files are mapped beside the heap, before there is an optimizer or a step.
        loaded = {part: kept[part] for part in ("process", "weights", "adapter")}
        everything = {**loaded, **parts} if name == "load" else _with_holes(kept, parts, setup)
        whole[name] = {part: int(size) for part, size in everything.items() if size}
    totals = {name: sum(parts.values()) for name, parts in whole.items()}
    peak = max(totals, key=lambda name: totals[name])
    return Estimate(whole[peak], peak, totals)


def _with_holes(kept: dict[str, float], passing: dict[str, float], setup: Setup) -> dict[str, float]:
    parts = {**kept, **passing}
    heap = HEAP_HOLES if setup.thread_cache else HEAP_HOLES_WITHOUT_CACHE
    share = heap if setup.device == "cpu" else CUDA_HOLES
    # Gradients are few, large, and the same in every step: they fit where they were. Gathered weights go back.
    changing = sum(size for part, size in passing.items() if "gradient" not in part and part != "gathered weights")
    return {**parts, "heap holes": share * changing}


# --- what stays from step to step -----------------------------------------------------------------------------------


def _state(blueprint: Blueprint, setup: Setup, work: Workload) -> dict[str, float]:
    trained = blueprint.trainable
    sharded = setup.strategy in ("zero1", "zero2", "zero3", "fsdp")
    moments = moment_bytes(blueprint, setup)
    # DeepSpeed keeps fp32 weights of its own beside those it computes with, even where these are fp32.
    masters = FP32 * trained if setup.strategy.startswith("zero") else 0
    return {
        "process": process_bytes(blueprint, setup),
        "compiled kernels": _kernels(blueprint, setup, work),
        "weights": weight_bytes(blueprint, setup),
        "adapter": adapter_bytes(blueprint, setup),
        "optimizer": (moments + masters) / (setup.sharers if sharded else 1),
        "checkpoint copy": copy_bytes(blueprint, setup),
    }


def moment_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """The optimizer's state of all trained weights: see ``training/optimizers.py`` and ``training/eight_bit.py``."""
    trained = blueprint.trainable
    if setup.optimizer.endswith("8bit"):
        # Two bytes, and an fp32 scale for each block of 256 of them.
        return 2 * (1 + FP32 / 256) * trained
    if setup.optimizer == "adafactor":
        # A row and a column of each matrix; of a square one of width w that is 2/w of its weights.
        return FP32 * trained * 2 / (blueprint.hidden if blueprint.adapter == 0 else max(1, blueprint.rank))
    if setup.optimizer == "muon":
        # One moment of hidden matrices, two of embedding and head.
        tables = blueprint.embedding + (0 if blueprint.tied else blueprint.head)
        return FP32 * (trained + (tables if blueprint.adapter == 0 else 0))
    return 2 * FP32 * trained


def copy_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """A worker's part of a checkpoint, as ``training/snapshot.py`` copies it; on a GPU that is memory of the CPU."""
    if not setup.copies or setup.device == "cuda":
        return 0
    # The first worker writes an adapter; all share in whole models, and in moments.
    weights = FP32 * (blueprint.adapter or blueprint.base / setup.workers)
    return weights + moment_bytes(blueprint, setup) / setup.workers


def process_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """The process before it has a model: on a GPU its context there, on a CPU the resident libraries."""
    if setup.device == "cuda":
        return CUDA_CONTEXT
    return PROCESS + TOKENIZER_ENTRY * blueprint.vocabulary + (RAY_WORKER if setup.ray else 0)


def weight_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """The base model's weights on one worker: fp32 where they are trained, else as the arithmetic wants them."""
    trained = blueprint.adapter == 0
    if trained:
        each = setup.element if setup.strategy.startswith("zero") else FP32
        whole = float(each * blueprint.base)
    elif setup.storage_bits:
        rest = blueprint.base - blueprint.linear_weights
        scales = blueprint.linear_weights * BITS_OVERHEAD[setup.storage_bits] / 8
        packed = blueprint.linear_weights * setup.storage_bits / 8 + rest * setup.element
        # Every worker has all scales.
        return scales + packed / (setup.sharers if setup.strategy == "fsdp" else 1)
    else:
        whole = float(setup.element * blueprint.base)
    return whole / (setup.sharers if setup.strategy in ("fsdp", "zero3") else 1)


def adapter_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """The adapter's fp32 weights on one worker."""
    return FP32 * blueprint.adapter / (setup.sharers if setup.strategy in ("fsdp", "zero3") else 1)


def _kernels(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """Generated code for products of bf16 matrices on a CPU, for each shape that has come by."""
    if setup.device == "cuda" or setup.precision != "bf16":
        return 0
    shapes = {(linear.inputs, linear.outputs) for block in blueprint.blocks for linear in block.linears}
    ins, outs = {i for i, _ in shapes}, {o for _, o in shapes}
    # Forward and input gradient of each shape; then weight gradients, or LoRA's products with its two matrices.
    per_count = 2 * len(shapes) + (2 * len(ins) + 3 * len(outs) + len(ins) if blueprint.adapter else len(shapes))
    wanted = per_count * work.token_counts + KERNELS_PER_ROW * work.row_lengths
    return KERNEL * min(KERNEL_CACHE, wanted)


# --- the moments of a step ------------------------------------------------------------------------------------------


def _load(setup: Setup) -> dict[str, float]:
    """Reading files that hold another dtype: their pages count as the process's own while weights are copied."""
    if setup.device == "cuda" or setup.stored_bytes is None or setup.stored_as_computed:
        return {}
    return {"model files": float(setup.stored_bytes)}


def _forward(blueprint: Blueprint, setup: Setup, work: Workload) -> dict[str, float]:
    """The end of the forward pass: all that is kept for the backward pass, and the logits."""
    return {
        # After the first micro-batch of a step there are gradients to add to.
        "gradients": (gradient_bytes(blueprint, setup) if work.accumulates else 0) + _head_gradient(blueprint, setup),
        "activations": kept_bytes(blueprint, setup, work),
        "weights cast": cast_bytes(blueprint, setup),
        "logits": logit_bytes(blueprint, setup, work),
        "gathered weights": gathered_bytes(blueprint, setup),
        "unpacked weight": unpacked_bytes(blueprint, setup),
    }


def _backward(blueprint: Blueprint, setup: Setup, work: Workload) -> dict[str, float]:
    """The end of the backward pass: all gradients, and one layer's activations and their gradients."""
    layers = max(1, blueprint.layers)
    last_layer = layer_bytes(blueprint, setup, work) / layers
    whole = blueprint.adapter == 0
    # An embedding's gradient is a dense one of its own. One that is tied to the head ends up beside the head's, which
    # has waited for it, and beside the sum of earlier micro-batches.
    tables = blueprint.embedding + (blueprint.head if blueprint.tied and work.accumulates else 0)
    # Gradients of this size do not fit where a chunk of logits was, and a heap that keeps freed memory keeps that too.
    kept = setup.device == "cpu" and setup.strategy == "ddp" and whole
    return {
        "gradients": gradient_bytes(blueprint, setup) + (FP32 * tables if whole else 0),
        "logits": logit_bytes(blueprint, setup, work) if kept else 0,
        # FSDP shares gradients out during the backward pass.
        "gradient buckets": bucket_bytes(blueprint, setup) if setup.strategy == "fsdp" else 0,
        "activations": last_layer + widest_bytes(blueprint, setup, work),
        "gathered weights": gathered_bytes(blueprint, setup),
        "unpacked weight": unpacked_bytes(blueprint, setup),
    }


def _recompute(blueprint: Blueprint, setup: Setup, work: Workload) -> dict[str, float]:
    """With checkpointing, the start of the backward pass: the layers' inputs, and the last layer all over."""
    if not setup.checkpointing:
        return {}
    layers = max(1, blueprint.layers)
    return {
        "gradients": (gradient_bytes(blueprint, setup) if work.accumulates else 0) + _head_gradient(blueprint, setup),
        "activations": kept_bytes(blueprint, setup, work)
        + layer_bytes(blueprint, setup, work) / layers
        + widest_bytes(blueprint, setup, work),
        "weights cast": cast_bytes(blueprint, setup) / layers,
        "gathered weights": gathered_bytes(blueprint, setup),
        "unpacked weight": unpacked_bytes(blueprint, setup),
    }


def _reduce(blueprint: Blueprint, setup: Setup) -> dict[str, float]:
    """The sum of the gradients over the workers, and the update."""
    # ZeRO-3 has freed them by then, in pieces so small that the heap of a CPU keeps them.
    still_there = setup.strategy == "zero3" and setup.device == "cpu"
    return {
        "gradients": gradient_bytes(blueprint, setup),
        "gradient buckets": bucket_bytes(blueprint, setup),
        "gathered weights": gathered_bytes(blueprint, setup) if still_there else 0,
    }


# --- parts of the moments -------------------------------------------------------------------------------------------


def gradient_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Gradients on one worker: as wide as the weights they belong to."""
    each = setup.element if setup.strategy.startswith("zero") else FP32
    shared = setup.sharers if setup.strategy in ("fsdp", "zero2", "zero3") else 1
    return each * blueprint.trainable / shared


def bucket_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Flat copies of gradients on their way; in data parallelism gradients lie in the buckets themselves."""
    if setup.strategy == "fsdp":
        # Whole gradients of what is shared at once, and their flat copy: last those of embedding and head.
        return 2 * FP32 * max(_trained_per_layer(blueprint), root_weights(blueprint) if blueprint.adapter == 0 else 0)
    # ZeRO-3 updates from a flat fp32 copy of a worker's gradients, of so many at a time.
    flat = FP32 * min(blueprint.trainable / setup.sharers, ZERO_GROUP) if setup.strategy == "zero3" else 0
    if setup.workers == 1 or setup.strategy == "ddp":
        return flat
    return flat + setup.element * min(blueprint.trainable, ZERO_BUCKET)


def unpacked_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """The largest packed weight, unpacked for its product (from 8 bits by way of fp32)."""
    if setup.storage_bits is None or blueprint.adapter == 0:
        return 0
    layers = [linear for block in blueprint.blocks for linear in block.linears]
    layers += [linear for linear, _ in blueprint.other_linears]
    largest = max((linear.weights for linear in layers), default=0)
    return largest * (setup.element + (FP32 if setup.storage_bits == 8 else 0))


def gathered_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Whole weights gathered from the workers' shares.

    FSDP keeps what lies outside of the layers, and has two layers (one ahead) or, where they are not given back, all of
    them; it copies even where one worker has everything. ZeRO-3 gives nothing back that it needs again soon.
    """
    if setup.strategy == "fsdp":
        layers = 2 * blueprint.layer if setup.reshard else blueprint.layer * blueprint.layers + blueprint.adapter
        return setup.element * (root_weights(blueprint) + layers)
    if setup.strategy != "zero3" or setup.workers == 1:
        return 0
    return setup.element * min(blueprint.base, max(ZERO_LIVE, blueprint.layer, blueprint.head))


def root_weights(blueprint: Blueprint) -> int:
    """Weights outside of the decoder layers: embedding, head and the last norm."""
    return blueprint.base - blueprint.layer * blueprint.layers


def _trained_per_layer(blueprint: Blueprint) -> float:
    return blueprint.layer if blueprint.adapter == 0 else blueprint.adapter / max(1, blueprint.layers)


def cast_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """bf16 copies of fp32 weights that autocast makes, and autograd keeps; adapters are cast as well."""
    if setup.precision != "bf16" or setup.computes_with_copies:
        return 0
    return 2 * (blueprint.linear_weights if blueprint.adapter == 0 else blueprint.adapter)


def logit_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """Logits of one chunk in fp32 and in the arithmetic's dtype; all of them where the model's own head makes them."""
    rows = work.targets
    if blueprint.plain_head and not blueprint.head_is_adapted:
        rows = min(rows, max(CHUNK_ROWS, CHUNK_ELEMENTS // blueprint.vocabulary))
        copies = FP32 + (setup.element if setup.precision == "bf16" else 0)
    else:
        # The model's own head: logits, an fp32 copy, their softmax and their gradient.
        copies = setup.element + 3 * FP32
    return copies * rows * blueprint.vocabulary


def _head_gradient(blueprint: Blueprint, setup: Setup) -> float:
    """A trained head's gradient in fp32, which the loss has before the backward pass; a chunk's product in bf16."""
    if blueprint.adapter != 0:
        return 0
    return (FP32 + (0 if setup.precision == "fp32" else setup.element)) * blueprint.head
