"""The ``parallel`` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from finray.config.extensions import named
from finray.config.section import PositiveInt, Section


class ParallelConfig(Section):
    """How the work is divided between workers."""

    strategy: Annotated[str, AfterValidator(named("finray.strategies", "auto"))] = Field(
        "ddp",
        description="`ddp`: a full copy of the model on each worker, gradients all-reduced. `fsdp`: weights, gradients "
        "and optimizer state sharded across the workers (FSDP2). `deepspeed`: sharded by DeepSpeed ZeRO. `auto`: "
        "`ddp` if the run fits into memory, else `fsdp`. Or your own as `package.module:Class`.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="`fsdp`: free the gathered weights of a layer after its forward pass and gather them again for the "
        "backward pass.",
    )
    shard_size: PositiveInt | None = Field(
        None,
        description="`fsdp`: number of workers that the weights are sharded across (hybrid sharding). null is all.",
    )
    cpu_offload: bool = Field(
        False,
        description="`fsdp`, `deepspeed`: keep the optimizer state, and the weights if they are sharded, in CPU "
        "memory.",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="`deepspeed`: what is sharded: 1 the optimizer state, 2 gradients too, 3 weights too. null takes "
        "the stage of `parallel.deepspeed_config`, else 2.",
    )
    deepspeed_config: str | None = Field(
        None,
        description='`deepspeed`: your own JSON file. What it leaves out or sets to `"auto"` follows from this '
        "configuration; a value that contradicts it is an error.",
    )
    keep_deepspeed_shards: bool = Field(
        True,
        description="`deepspeed`: also keep DeepSpeed's own files in every checkpoint, with `zero_to_fp32.py`. finray "
        "does not read them.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> ParallelConfig:
        for name in ("zero_stage", "deepspeed_config"):
            if getattr(self, name) is not None and self.strategy != "deepspeed":
                raise ValueError(f"parallel.{name} has no effect with parallel.strategy {self.strategy}")
        return self
