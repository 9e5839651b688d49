"""Peak memory of one training worker, from a model's sizes, the activations of its layers, and the sharding.

Every part is a formula over a :class:`Blueprint`, a :class:`Setup` and a :class:`Workload`; nothing is fitted to a
model. Memory rises and falls within a step, so the formulas are added up for each phase, and the largest sum is the
estimate. `benchmarks/run.py memory` compares it with measured peaks.

The formulas follow the code: ``planning/layers.py`` measures what is saved for the backward pass, ``models/head.py``
computes logits in chunks, ``parallel/ddp.py`` all-reduces gradients in place, and ``training/optim/`` keeps two moments
per trained parameter, of its width or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from finray.models.head import chunk_rows
from finray.planning.blueprint import Blueprint
from finray.planning.layers import Arithmetic, LayerMemory
from finray.planning.placement import KERNEL_CACHE

Strategy = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
FP32 = 4
MIB = 2**20
# Resident memory of a worker that has imported everything and done its first step on a Llama of width 16, without its
# tokenizer: Python, torch, Transformers, PEFT, TensorBoard. With torch 2.13 on Linux (x86-64) it was 540 to 570 MiB, of
# which 45 were bitsandbytes, which PEFT is kept from importing now. Then what a Ray worker has beside that.
PROCESS = 510 * MIB
RAY_WORKER = 85 * MIB
# A fast tokenizer's tables, per entry of the vocabulary.
TOKENIZER_ENTRY = 680
# CUDA context and kernels; not in what torch's allocator counts.
CUDA_CONTEXT = 600 * MIB
# What oneDNN keeps of the code it generates for a shape of a bf16 product on a CPU; and the shapes in the attention of
# one row, forward and backward, where it is products (models/attention.py).
KERNEL = 600 * 1024
KERNELS_PER_ROW = 6
# Share of allocations in a step that is lost to fragmentation. On a CPU workers keep freed memory, because mapping it
# again costs more than the arithmetic (training/allocator.py), so glibc's heap has holes. No formula over shapes
# predicts them: this share fits the cases of `benchmarks/run.py memory` best, with glibc 2.36. On a GPU expandable
# segments leave few.
HOLES = {"cpu": 0.4, "cuda": 0.03}
# Scales of quantized storage, in bits a weight: for 4 bits (NF4, double quantization) a byte per 64 weights and four
# per 64 * 256, for 8 bits an fp32 number per row, of some hundred to some thousand weights.
BITS_OVERHEAD = {4: 8 / 64 + 32 / (64 * 256), 8: 0.03}
# DeepSpeed's default sizes, in elements: of its buckets, of the gathered weights that ZeRO-3 keeps for reuse, and of
# what ZeRO-3 updates at a time.
ZERO_BUCKET = 500_000_000
ZERO_LIVE = 1_000_000_000
ZERO_GROUP = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Setup:
    """The training settings that affect memory."""

    strategy: Strategy = "ddp"
    workers: int = 1
    shards: int | None = None  # workers that share one copy, in hybrid sharding; None for all of them
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"  # of the forward and backward pass; bf16 stands for fp16 too
    weights: Literal["fp32", "bf16"] = "fp32"  # of weights, gradients and moments where all weights are trained
    checkpointing: str = "none"  # as `train.gradient_checkpointing`
    storage_bits: int | None = None  # 4 or 8 where frozen linear layers are quantized
    reshard: bool = True  # whether FSDP frees gathered weights after the forward pass
    ray: bool = True  # whether the worker is Ray's
    optimizer: str = "adamw"
    copies: bool = False  # whether checkpoints are copied in memory, to be written in the background
    read_bytes: int = 0  # of files whose weights are converted as they are read, so that both exist for a moment
    optimizer_offload: bool = False  # whether a GPU's share of the optimizer is in CPU memory
    weight_offload: bool = False  # and its share of the weights
    activation_offload: bool = False  # and what layers keep for the backward pass
    reference: float = 0.0  # bytes of the reference that is computed in the step
    attention_kernel: bool = False  # whether attention on a CPU is one kernel for all lengths of rows

    @property
    def sharers(self) -> int:
        """Number of workers that share one sharded copy."""
        return self.shards or self.workers

    @property
    def element(self) -> int:
        """Bytes per element in the forward and backward pass."""
        return 2 if self.precision == "bf16" else FP32

    @property
    def trained(self) -> int:
        """Bytes per weight in full fine-tuning."""
        return 2 if self.weights == "bf16" else FP32

    @property
    def arithmetic(self) -> Arithmetic:
        """The settings that determine the size of activations."""
        return Arithmetic(self.precision, self.device, self.strategy != "ddp" or self.weights == "bf16")


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows that a worker processes at once."""

    rows: tuple[int, ...]  # tokens of each row of the largest micro-batch
    targets: int  # positions with a label in it
    accumulates: bool = True  # whether a worker has more than one micro-batch per step
    token_counts: int = 1  # how many different numbers of tokens micro-batches have
    row_lengths: int = 1  # how many different lengths rows have


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The peak of a worker: bytes by part in its ``phase``, and total bytes in each phase."""

    parts: Mapping[str, int]
    phase: str
    phases: Mapping[str, int]
    offloaded: int = 0  # bytes beside them in CPU memory, where the worker has a GPU

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def estimate(blueprint: Blueprint, layers: LayerMemory, setup: Setup, work: Workload) -> MemoryEstimate:
    """Estimate the peak memory of a worker, by part."""
    full, on_cpu = blueprint.adapter == 0, setup.device == "cpu"
    state, offloaded = _state(blueprint, setup, work)
    weights = {"gathered weights": gathered_bytes(blueprint, setup)}
    if setup.storage_bits and not full:
        # The largest quantized weight is dequantized for its product (from 8 bits via fp32).
        largest = max((linear.weights for linear, _ in blueprint.linears), default=0)
        weights["unpacked weight"] = largest * (setup.element + (FP32 if setup.storage_bits == 8 else 0))
    gradients = gradient_bytes(blueprint, setup)
    if setup.weight_offload or (setup.optimizer_offload and setup.strategy in ("zero2", "zero3")):
        # Gradients are offloaded with the optimizer.
        gradients, offloaded = 0.0, offloaded + gradients
    # The loss computes a trained head's gradient before the backward pass: in fp32, plus a chunk's product.
    head = (FP32 + (0 if setup.precision == "fp32" else setup.element)) * blueprint.head if full else 0
    # From the second micro-batch of a step on, there are gradients to accumulate into.
    before = {"gradients": (gradients if work.accumulates else 0) + head}
    # Hidden states at labelled positions, and their gradient.
    picked = (layers.hidden + setup.element * blueprint.hidden) * work.targets
    kept = layers.outside(work.rows) + picked
    if setup.checkpointing == "none":
        by_layers = layers.kept(work.rows)
    else:
        by_layers = layers.inputs(work.rows) + (layers.products(work.rows) if setup.checkpointing == "selective" else 0)
    if setup.activation_offload:
        offloaded += by_layers
    else:
        kept += by_layers
    working, cast, logits = layers.working(work.rows), cast_bytes(blueprint, setup), logit_bytes(blueprint, setup, work)
    # An embedding's gradient is dense and separate. If tied to the head, it exists together with the head's and with
    # the sum of earlier micro-batches.
    tables = blueprint.embedding + (blueprint.head if blueprint.tied and work.accumulates else 0)
    beside = setup.trained * tables
    if setup.weights == "bf16":
        # The loss computes a head's gradient in fp32. It is rounded and freed before the embedding's gradient exists.
        beside = max(beside, (FP32 + (setup.trained if work.accumulates else 0)) * blueprint.head)
    # The loss has its own copy of a trained head's weights.
    cast_head = 2 * blueprint.head if cast and full else 0
    passing = {
        "forward": {**before, "activations": kept, "weights cast": cast + cast_head, "logits": logits, **weights},
        "backward": {
            "gradients": gradients + (beside if full else 0),
            # Gradients of this size do not fit into the space of a freed chunk of logits, and a heap that keeps freed
            # memory keeps both. `runtime/worker.py` says which runs return large blocks instead.
            "logits": logits if on_cpu and setup.strategy == "ddp" and setup.weights != "bf16" and full else 0,
            # FSDP reduce-scatters gradients during the backward pass.
            "gradient buckets": bucket_bytes(blueprint, setup) if setup.strategy == "fsdp" else 0,
            "activations": working,
            **weights,
        },
        "reduce": {
            "gradients": gradients,
            "gradient buckets": bucket_bytes(blueprint, setup),
            # ZeRO-3 has freed them by then, in pieces so small that a CPU's heap keeps them.
            "gathered weights": weights["gathered weights"] if setup.strategy == "zero3" and on_cpu else 0,
        },
    }
    if setup.checkpointing != "none":
        # The start of the backward pass: what was saved, and the recomputed last layer.
        passing["recompute"] = {
            **before,
            "activations": kept + working,
            "weights cast": cast / max(1, blueprint.layers),
            **weights,
        }
    whole: dict[str, dict[str, int]] = {}
    for name, parts in passing.items():
        # Gradients are few, large, and the same in every step: they reuse their space. Gathered weights are freed.
        changing = sum(size for part, size in parts.items() if "gradient" not in part and part != "gathered weights")
        everything = {**state, **parts, "heap holes": HOLES[setup.device] * changing}
        whole[name] = {part: int(size) for part, size in everything.items() if size}
    if on_cpu and setup.read_bytes:
        # Memory-mapped file pages count as the process's own while weights are copied, before anything else.
        loaded = {part: int(state[part]) for part in ("process", "weights", "adapter") if state[part]}
        whole["load"] = {**loaded, "model files": setup.read_bytes}
    totals = {name: sum(parts.values()) for name, parts in whole.items()}
    peak = max(totals, key=lambda name: totals[name])
    return MemoryEstimate(whole[peak], peak, totals, int(offloaded))


def _state(blueprint: Blueprint, setup: Setup, work: Workload) -> tuple[dict[str, float], float]:
    """Memory that persists between steps, and the offloaded bytes."""
    trained, full = blueprint.trainable, blueprint.adapter == 0
    # The optimizer's state for all trained weights: see training/optim/.
    if setup.optimizer.endswith("8bit"):
        # Two bytes per weight, and an fp32 scale for each block of 256 bytes.
        moments = 2 * (1 + FP32 / 256) * trained
    elif setup.optimizer == "adafactor":
        # A row and a column per matrix; for a square one of width w that is 2/w of its weights.
        moments = FP32 * trained * 2 / (blueprint.hidden if full else max(1, blueprint.rank))
    elif setup.optimizer == "muon":
        # One moment for hidden matrices, two for embedding and head.
        tables = blueprint.embedding + (0 if blueprint.tied else blueprint.head)
        moments = FP32 * (trained + (tables if full else 0))
    else:
        moments = 2 * (setup.trained if full else FP32) * trained
    # DeepSpeed keeps separate fp32 weights besides those it computes with, even if these are fp32.
    masters = FP32 * trained if setup.strategy.startswith("zero") else 0
    kernels = copy = 0.0
    if setup.device == "cuda":
        process = CUDA_CONTEXT
    else:
        process = PROCESS + TOKENIZER_ENTRY * blueprint.vocabulary + (RAY_WORKER if setup.ray else 0)
        if setup.precision == "bf16":
            # Forward and input gradient of each shape; then weight gradients, or LoRA's products with its matrices.
            shapes = {(linear.inputs, linear.outputs) for linear, _ in blueprint.linears}
            ins, outs = {i for i, _ in shapes}, {o for _, o in shapes}
            per_count = 2 * len(shapes) + (len(shapes) if full else 3 * len(ins) + 3 * len(outs))
            per_count += 3 if full else 2  # the head
            per_row = 0 if setup.attention_kernel else KERNELS_PER_ROW
            wanted = per_count * work.token_counts + per_row * work.row_lengths
            kernels = KERNEL * min(KERNEL_CACHE, wanted)
        if setup.copies:
            # A worker's part of a checkpoint, copied to CPU memory by training/checkpointing.py. The first worker
            # writes an adapter; whole models and moments are divided among all.
            weights = setup.trained * blueprint.base / setup.workers if full else FP32 * blueprint.adapter
            copy = weights + moments / setup.workers
    state = {
        "process": process,
        "compiled kernels": kernels,
        "weights": weight_bytes(blueprint, setup),
        "adapter": adapter_bytes(blueprint, setup),
        "optimizer": (moments + masters) / (1 if setup.strategy == "ddp" else setup.sharers),
        "reference": setup.reference,
        "checkpoint copy": copy,
    }
    moved = [*(["optimizer"] if setup.optimizer_offload else []), *(["weights", "adapter"] * setup.weight_offload)]
    offloaded = sum(state[part] for part in moved)
    return state | dict.fromkeys(moved, 0.0), offloaded


def weight_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Bytes of the base model's weights on one worker: in the compute dtype if they are frozen."""
    if blueprint.adapter == 0:
        whole = float(blueprint.base * (setup.element if setup.strategy.startswith("zero") else setup.trained))
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
    """Bytes of the adapter's fp32 weights on one worker."""
    return FP32 * blueprint.adapter / (setup.sharers if setup.strategy in ("fsdp", "zero3") else 1)


def reference_bytes(blueprint: Blueprint, setup: Setup, *, is_copy: bool) -> float:
    """Bytes of a reference on one worker: a frozen copy of an adapter, or a model that FSDP shards if weights are."""
    around = replace(setup, strategy="fsdp" if setup.strategy in ("fsdp", "zero3") else "ddp")
    whole = 0 if is_copy else weight_bytes(blueprint, around) + gathered_bytes(blueprint, around)
    return adapter_bytes(blueprint, around) + whole


def gradient_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Bytes of gradients on one worker: as wide as their weights."""
    each = setup.element if setup.strategy.startswith("zero") else FP32 if blueprint.adapter else setup.trained
    return each * blueprint.trainable / (setup.sharers if setup.strategy in ("fsdp", "zero2", "zero3") else 1)


def bucket_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Bytes of flat gradient copies during communication; with DDP the gradients themselves are in the buckets."""
    full = blueprint.adapter == 0
    if setup.strategy == "fsdp":
        # Whole gradients of a sharded group, and their flat copy: finally those of embedding and head, copied one after
        # the other.
        layer = blueprint.layer if full else blueprint.adapter / max(1, blueprint.layers)
        others = blueprint.base - blueprint.layer * blueprint.layers if full else 0
        copied = others if blueprint.tied else max(blueprint.embedding, others - blueprint.embedding)
        return FP32 * (max(layer, others) + max(layer, copied if full else 0))
    # ZeRO-3 updates from a flat fp32 copy of a worker's gradients, this many at a time.
    flat = FP32 * min(blueprint.trainable / setup.sharers, ZERO_GROUP) if setup.strategy == "zero3" else 0
    if setup.optimizer_offload:
        flat = 0
    if setup.workers == 1 or setup.strategy == "ddp":
        return flat
    return flat + setup.element * min(blueprint.trainable, ZERO_BUCKET)


def gathered_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Bytes of whole weights gathered from the workers' shards.

    FSDP keeps weights outside of the layers gathered, and those of two layers (one prefetched) or, without resharding,
    of all; it copies even with one worker. ZeRO-3 keeps what it needs again soon.
    """
    if setup.strategy == "fsdp":
        layers, layer = blueprint.layer * blueprint.layers, float(setup.element * blueprint.layer)
        if setup.storage_bits and blueprint.adapter:
            # Quantized weights are gathered as they are stored.
            packed = blueprint.linear_weights / max(1, blueprint.layers)
            layer += packed * (setup.storage_bits / 8 - setup.element)
        gathered = 2 * layer if setup.reshard else blueprint.layers * layer + setup.element * blueprint.adapter
        return setup.element * (blueprint.base - layers) + gathered
    if setup.strategy != "zero3" or setup.workers == 1:
        return 0
    return setup.element * min(blueprint.base, max(ZERO_LIVE, blueprint.layer, blueprint.head))


def cast_bytes(blueprint: Blueprint, setup: Setup) -> float:
    """Bytes of bf16 copies of fp32 weights that autocast creates and autograd saves; adapters are cast as well."""
    if setup.precision != "bf16" or setup.strategy != "ddp" or setup.weights == "bf16":
        return 0
    return 2 * (blueprint.adapter or blueprint.linear_weights + blueprint.experts)


def logit_bytes(blueprint: Blueprint, setup: Setup, work: Workload) -> float:
    """Bytes of one chunk of logits in fp32 and of its copy; of all logits if the model's own head is used."""
    rows = 0 if blueprint.classifies else work.targets
    if blueprint.chunks_head:
        rows = min(rows, chunk_rows(blueprint.vocabulary, setup.device))
        # On a GPU their softmax is a tensor of its own.
        beside = FP32 if setup.device == "cuda" else setup.element if setup.precision == "bf16" else 0
        copies = FP32 + beside
    else:
        # The model's own head: logits, an fp32 copy, their softmax and their gradient.
        copies = setup.element + 3 * FP32
    return copies * rows * blueprint.vocabulary
