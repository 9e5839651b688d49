"""How work is shared between workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from finray.config.section import PositiveInt, Section


class ParallelConfig(Section):
    """How the work is shared between workers."""

    strategy: Literal["ddp", "fsdp", "deepspeed", "auto"] = Field(
        "ddp",
        description="`ddp`: a full model per worker, gradients summed. `fsdp`: weights, gradients and optimizer state "
        "shared between the workers (FSDP2). `deepspeed`: the same by DeepSpeed's ZeRO, in three stages. `auto`: `ddp` "
        "where it fits into memory, else `fsdp`.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="`fsdp`: free gathered weights after the forward pass and gather them again for the backward.",
    )
    shard_size: PositiveInt | None = Field(
        None, description="`fsdp`: workers that share one copy of the weights (hybrid sharding); null for all of them."
    )
    cpu_offload: bool = Field(
        False,
        description="`fsdp`, `deepspeed`: keep optimizer state in the memory of the CPU, and weights where they are "
        "sharded.",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="`deepspeed`: what is sharded. 1: optimizer state, 2: gradients too, 3: weights too; null takes "
        "that of the JSON, else 2.",
    )
    deepspeed_config: str | None = Field(
        None,
        description='`deepspeed`: your own JSON. What it leaves out, or calls `"auto"`, follows from this file; what '
        "it says differently is an error.",
    )
    keep_deepspeed_shards: bool = Field(
        True,
        description="`deepspeed`: keep DeepSpeed's own files in every checkpoint too, with `zero_to_fp32.py`. finray "
        "does not read them.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> ParallelConfig:
        for name in ("zero_stage", "deepspeed_config"):
            if getattr(self, name) is not None and self.strategy != "deepspeed":
                raise ValueError(f"parallel.{name} has no effect with parallel.strategy {self.strategy}")
        return self
