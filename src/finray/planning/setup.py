"""What an estimate of memory is made for: how a model is trained, and the rows that a worker has at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
FP32 = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained, as far as memory is concerned.

    Attributes:
        strategy: how workers share the state.
        workers: how many there are.
        shards: workers that share one copy, where FSDP keeps several (hybrid sharding); None for all of them.
        device: ``cpu`` or ``cuda``.
        precision: of the arithmetic, ``fp32`` or ``bf16``, which stands for fp16 too.
        checkpointing: whether activations are computed again in the backward pass.
        selective: with checkpointing, whether outputs of matrix products and attention are kept nevertheless.
        dropout: whether the adapter's inputs are dropped at random.
        storage_bits: 4 or 8 where frozen linear layers are quantised, else None.
        reshard: whether FSDP gives gathered weights back after the forward pass.
        ray: whether the worker is Ray's.
        thread_cache: whether the C library's allocator has its per-thread cache, as it does unless told otherwise.
        optimizer: as ``train.optimizer``.
        copies: whether checkpoints are copied in memory, to be written behind the training.
        stored_bytes: size of the model's files, or None where that is not known.
        stored_as_computed: whether the files hold the dtype in which weights are kept, so that they are mapped and
            not copied.
    """

    strategy: Strategy = "ddp"
    workers: int = 1
    shards: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpointing: bool = False
    selective: bool = False
    dropout: bool = False
    storage_bits: int | None = None
    reshard: bool = True
    ray: bool = True
    thread_cache: bool = True
    optimizer: str = "adamw"
    copies: bool = False
    stored_bytes: int | None = None
    stored_as_computed: bool = True

    @property
    def sharers(self) -> int:
        """Workers that share one copy of what is shared."""
        return self.shards or self.workers

    @property
    def computes_with_copies(self) -> bool:
        """Whether trained weights are there in the arithmetic's dtype while they are used, not cast by autocast."""
        return self.strategy == "fsdp" or self.strategy.startswith("zero")

    @property
    def element(self) -> int:
        """Bytes of an element in the arithmetic."""
        return 2 if self.precision == "bf16" else FP32


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows that a worker has at once.

    Attributes:
        rows: tokens of each row of the largest micro-batch.
        targets: positions with a label in it.
        accumulates: whether a worker has more than one micro-batch per step.
        token_counts: how many different numbers of tokens micro-batches have.
        row_lengths: how many different lengths rows have.
    """

    rows: tuple[int, ...]
    targets: int
    accumulates: bool = True
    token_counts: int = 1
    row_lengths: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return sum(self.rows)
