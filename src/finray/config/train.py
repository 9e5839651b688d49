"""How it learns: the optimisation, how workers share it, what is saved, evaluated and recorded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from finray.config.section import PositiveInt, Ratio, Section


class ProfileConfig(Section):
    """Steps that are looked at closely."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="The first step and the last.")

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError("train.profile: steps are the first and the last, in this order")
        return self


def _checkpointing_by_name(value: Any) -> Any:
    """Before there were two kinds it was true or false."""
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class TrainConfig(Section):
    """The optimisation."""

    epochs: float | None = Field(
        None, gt=0, description="Passes over the data (1 when neither this nor `max_steps` is set)."
    )
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; replaces `epochs`.")
    global_batch_size: PositiveInt = Field(
        8, description="Packs (rows without packing) per optimizer step, over all workers and accumulation."
    )
    micro_batch_size: PositiveInt = Field(
        1, description="Packs (or rows) per forward pass and worker. Accumulation is derived from it."
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay after warm-up.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up; replaces `warmup_ratio`.")
    warmup_ratio: Ratio = Field(0.03, description="Share of all steps spent on warm-up.")
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = Field(
        "adamw",
        description="`adamw`; `adamw_8bit`: its state in 8 bits (bitsandbytes); `paged_adamw_8bit`: that state moves "
        "to the CPU when a GPU is full; `adafactor`: a state of rows and columns; `muon`: for hidden matrices, with "
        "AdamW for the rest.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; never applied to norms and biases.")
    adam_beta1: Ratio = Field(0.9, description="AdamW decay of the first moment.")
    adam_beta2: Ratio = Field(0.999, description="AdamW decay of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the global gradient norm to this; null to leave it."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Arithmetic of forward and backward. `auto` is bf16 where the hardware has it, else fp32. `fp16` "
        "scales the loss, and leaves out updates whose gradients are too large.",
    )
    gradient_checkpointing: Annotated[Literal["none", "selective", "full"], BeforeValidator(_checkpointing_by_name)] = (
        Field(
            "none",
            description="Recompute activations in the backward pass to save memory: `full` all of a layer, `selective` "
            "all but its matrix products and attention (`true` and `false` are `full` and `none`).",
        )
    )
    activation_offload: bool = Field(
        False, description="Keep what the backward pass needs in the memory of the CPU meanwhile; for GPUs."
    )
    compile: bool = Field(
        False,
        description="Compile each layer with `torch.compile`; the first steps take much longer, and others less. Under "
        "`selective` checkpointing a compiled layer is computed again whole.",
    )
    liger: Literal["auto"] | bool = Field(
        "auto",
        description="Liger's kernels for norms, rotary embeddings and gated layers: `auto` on a GPU where they are "
        "installed. The loss stays finray's.",
    )
    profile: ProfileConfig | None = Field(
        None,
        description="Write a trace of some steps and a table of their time to `<run>/profile/`: `{steps: [10, 15]}`.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("set epochs or max_steps, not both")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("min_learning_rate is larger than learning_rate")
        return self
