"""The ``train`` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from finray.config.section import PositiveInt, Ratio, Section


class ProfileConfig(Section):
    """Steps to profile."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="The first and the last step to profile.")

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError("train.profile: steps are the first and the last, in this order")
        return self


class TrainConfig(Section):
    """Optimisation."""

    epochs: float | None = Field(
        None, gt=0, description="Passes over the data. 1 if neither `epochs` nor `max_steps` is set."
    )
    max_steps: PositiveInt | None = Field(None, description="Number of optimizer steps, instead of `epochs`.")
    global_batch_size: PositiveInt = Field(
        8,
        description="Packs (without packing: rows) per optimizer step, over all workers and accumulation steps.",
    )
    micro_batch_size: PositiveInt = Field(
        1,
        description="Packs (without packing: rows) per forward pass of a worker. Gradient accumulation follows from "
        "it.",
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay after warm-up.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up, instead of `warmup_ratio`.")
    warmup_ratio: Ratio = Field(0.03, description="Share of all steps used for warm-up.")
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = Field(
        "adamw",
        description="`adamw`; `adamw_8bit`: with 8-bit state (bitsandbytes); `paged_adamw_8bit`: 8-bit state that is "
        "paged to CPU memory when a GPU is full; `adafactor`: factored second moments; `muon`: Muon for hidden "
        "matrices, AdamW for the rest.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay. Never applied to norms and biases.")
    adam_beta1: Ratio = Field(0.9, description="AdamW: decay rate of the first moment.")
    adam_beta2: Ratio = Field(0.999, description="AdamW: decay rate of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW: epsilon.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the global gradient norm to this value. null turns clipping off."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Precision of forward and backward pass. `auto` is bf16 if the hardware supports it, else fp32. "
        "`fp16` scales the loss and skips steps whose gradients overflow.",
    )
    # Files written before there were two kinds say true or false.
    gradient_checkpointing: Annotated[
        Literal["none", "selective", "full"],
        BeforeValidator(lambda value: ("full" if value else "none") if isinstance(value, bool) else value),
    ] = Field(
        "none",
        description="Recompute activations in the backward pass to save memory: `full` recomputes whole layers, "
        "`selective` everything but matrix products and attention. `true` and `false` mean `full` and `none`.",
    )
    activation_offload: bool = Field(
        False, description="Keep activations in CPU memory between forward and backward pass. For GPUs."
    )
    compile: bool = Field(
        False,
        description="Compile each layer with `torch.compile`. The first steps take much longer, the others less. With "
        "`selective` checkpointing a compiled layer is recomputed as a whole.",
    )
    liger: Literal["auto"] | bool = Field(
        "auto",
        description="Use Liger's kernels for norms, rotary embeddings and gated MLPs. `auto` uses them on a GPU if "
        "they are installed. The loss is always finray's own.",
    )
    profile: ProfileConfig | None = Field(
        None,
        description="Write a trace of these steps, and a table of where their time went, to `<run>/profile/`: "
        "`{steps: [10, 15]}`.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("set epochs or max_steps, not both")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("min_learning_rate is larger than learning_rate")
        return self
