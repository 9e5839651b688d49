"""The configurations that `memory.py` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NO_CACHE = "glibc.malloc.tcache_count=0"


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration to measure.

    Attributes:
        name: of the case.
        model: `smollm2` or a key of `SHAPES`.
        adapter: `lora` or `none`.
        precision: `fp32` or `bf16`.
        packing: whether rows share packs.
        checkpointing: which activations are computed again.
        workers: processes.
        max_length: most tokens in a row and in a pack.
        micro_batch_size: packs (or rows) at a time.
        rows: how many rows there are.
        thread_cache: whether the C library's allocator has its per-thread cache.
        strategy: `parallel.strategy`.
        saves: whether checkpoints are written beside the steps.
    """

    name: str
    model: str
    adapter: str
    precision: str
    packing: bool = True
    checkpointing: str = "none"
    workers: int = 1
    max_length: int = 512
    micro_batch_size: int = 1
    rows: int = 16
    thread_cache: bool = True
    strategy: str = "ddp"
    saves: bool = False


def sharded(strategy: str, workers: int) -> Case:
    """Full fine-tuning of a model whose state is most of what a worker needs."""
    name = f"{strategy}-full-{workers}-worker{'s' if workers > 1 else ''}"
    return Case(name, "twelve-layers", "none", "fp32", workers=workers, max_length=64, strategy=strategy)


CPU_CASES = (
    Case("two-layers-lora", "two-layers", "lora", "fp32", micro_batch_size=2),
    Case("two-layers-full", "two-layers", "none", "bf16", packing=False, checkpointing="full"),
    Case("two-layers-full-no-cache", "two-layers", "none", "bf16", False, "full", thread_cache=False),
    Case("two-layers-full-2-workers", "two-layers", "none", "fp32", workers=2),
    Case("two-layers-full-saving", "two-layers", "none", "fp32", saves=True),
    # More than one step: in the first there are no moments yet while there are activations.
    Case("wide-full-2-workers", "two-wide-layers", "none", "fp32", workers=2),
    Case("smollm2-lora", "smollm2", "lora", "bf16", max_length=1024),
    Case("smollm2-lora-no-cache", "smollm2", "lora", "bf16", max_length=1024, thread_cache=False),
    Case("smollm2-lora-fp32", "smollm2", "lora", "fp32", max_length=1024, rows=8),
    Case("smollm2-lora-unpacked", "smollm2", "lora", "bf16", packing=False, micro_batch_size=2),
    Case("smollm2-lora-checkpointing", "smollm2", "lora", "bf16", checkpointing="full", max_length=1024),
    Case("smollm2-lora-selective", "smollm2", "lora", "bf16", checkpointing="selective", max_length=1024),
    Case("smollm2-lora-2-workers", "smollm2", "lora", "bf16", workers=2),
    Case("smollm2-full", "smollm2", "none", "bf16", rows=8),
    Case("smollm2-full-unpacked-checkpointing", "smollm2", "none", "fp32", packing=False, checkpointing="full", rows=6),
    *(sharded("fsdp", workers) for workers in (1, 2, 4)),
    *(sharded("deepspeed", workers) for workers in (1, 2, 4)),
)
GPU_CASES = (
    Case("gpu-135m-lora", "135m", "lora", "bf16", max_length=4096, rows=200),
    Case("gpu-135m-full", "135m", "none", "bf16", max_length=4096, rows=200),
    Case("gpu-1b-lora-checkpointing", "1b", "lora", "bf16", checkpointing="full", max_length=8192, rows=300),
    Case("gpu-1b-lora-unpacked", "1b", "lora", "bf16", packing=False, micro_batch_size=8, max_length=1024, rows=200),
)
# Llama's configuration: width, feed-forward, layers, heads, key heads, vocabulary.
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "two-layers": (256, 768, 2, 4, 2, 49152),
    "two-wide-layers": (1024, 2048, 2, 8, 4, 49152),
    "twelve-layers": (1024, 2048, 12, 8, 4, 49152),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1b": (2048, 8192, 16, 32, 8, 128256),
}


def llama_config(shape: str) -> Any:
    """A Llama of one of the shapes."""
    from transformers import AutoConfig

    width, wide, layers, heads, key_heads, vocabulary = SHAPES[shape]
    return AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
