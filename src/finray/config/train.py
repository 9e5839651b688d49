"""The section ``train``, with the options of its schedules and its profile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from finray.config.extensions import named
from finray.config.section import PositiveInt, Ratio, Section


class ProfileConfig(Section):
    """Steps to profile."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="The first and the last step to profile.")

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError("train.profile: give the first step and the last step, in this order")
        return self


class ScheduleOptions(Section):
    """What a schedule has besides its warm-up and `train.min_learning_rate`; names and defaults are Transformers'."""

    power: float | None = Field(
        None, gt=0, description="`polynomial`: power of the share of remaining steps. null is 1, linear."
    )
    num_cycles: PositiveInt | None = Field(
        None, description="`cosine_with_restarts`: number of cosine cycles, each starting at the peak. null is 1."
    )
    timescale: PositiveInt | None = Field(
        None,
        description="`inverse_sqrt`: timescale in steps; after 3 times as many steps the rate is half the peak. null "
        "is the number of warm-up steps, or 10,000 without warm-up.",
    )
    num_decay_steps: PositiveInt | None = Field(
        None, description="`wsd`: steps of the decay at the end. null is a tenth of all steps."
    )
    decay_type: Literal["cosine", "linear", "1-sqrt"] | None = Field(
        None, description="`wsd`: shape of the decay. null is `cosine`."
    )


# Which of them a schedule takes.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "cosine": (),
    "linear": (),
    "constant": (),
    "wsd": ("num_decay_steps", "decay_type"),
    "polynomial": ("power",),
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
}


class TrainConfig(Section):
    """Optimization."""

    objective: Annotated[str, AfterValidator(named("finray.objectives"))] | None = Field(
        None,
        description="What is learned: `sft` (the tokens of the answers), `classification`, from pairs of answers "
        "`dpo`, `orpo`, `simpo` or `reward` (a reward model), from single ones `kto`, or your own as "
        "`package.module:Name`. null is the task's: `sft` for `causal_lm`.",
    )
    epochs: float | None = Field(
        None,
        gt=0,
        description="Passes over the data. null (and no `max_steps`): as many as give 100 steps, between 1 and 3.",
    )
    max_steps: PositiveInt | None = Field(
        None, description="Number of optimizer steps. If it is set, `epochs` is ignored."
    )
    global_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Packs (without packing: rows; of pairs always pairs) per optimizer step, over all workers and "
        "accumulation steps. "
        "`auto` is 8, or less if an epoch would have fewer than 32 steps.",
    )
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Packs (without packing: rows) per forward pass of a worker. Gradient accumulation follows from "
        "it. `auto` is 1 on a CPU, and on a GPU as many as keep it busy, within memory and 16,384 tokens.",
    )
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="Peak learning rate. `auto` depends on the method, the task and the width of the model: LoRA takes "
        "more than all weights, and a small model more than a large one.",
    )
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant", "wsd", "polynomial", "cosine_with_restarts", "inverse_sqrt"] = (
        Field(
            "cosine",
            description="Shape of the decay after warm-up. `wsd` (warm-up, stable, decay) stays at the peak and falls "
            "at the end. With `warmup_steps`, `constant` and `inverse_sqrt` do not depend on the number of steps.",
        )
    )
    schedule_options: ScheduleOptions | None = Field(
        None,
        description="Options of the schedule: `{power: 2}`. An option of another schedule is an error.",
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps of linear warm-up. If it is set, `warmup_ratio` is ignored."
    )
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
        1.0, gt=0, description="Clip the global gradient norm to this value. null disables clipping."
    )
    router_loss: float = Field(
        0.0,
        ge=0,
        description="Mixture of experts: weight of the loss that keeps the router from choosing few experts "
        "(`router_aux_loss_coef` of the model's `config.json`), such as 0.001. The recorded loss is without it.",
    )
    precision: Literal["auto", "fp32", "bf16", "bf16-true", "fp16"] = Field(
        "auto",
        description="Precision of forward and backward pass. `auto` is bf16 if the hardware supports it, else fp32. "
        "`fp16` scales the loss and skips steps whose gradients overflow. With `bf16-true` weights, gradients and "
        "moments are in bf16 as well, without an fp32 copy: half the memory for full fine-tuning. Updates are "
        "rounded stochastically.",
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
        description="Compile each layer with `torch.compile`. The first steps take much longer, later steps less. With "
        "`selective` checkpointing a compiled layer is recomputed as a whole.",
    )
    liger: Literal["auto"] | bool = Field(
        "auto",
        description="Use Liger's kernels for norms, rotary embeddings and gated MLPs. `auto` uses them on a GPU if "
        "they are installed. The loss is always finray's own.",
    )
    profile: ProfileConfig | None = Field(
        None,
        description="Write a trace of these steps, and a table of the time spent in them, to `<run>/profile/`: "
        "`{steps: [10, 15]}`.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.learning_rate != "auto" and self.min_learning_rate > self.learning_rate:
            raise ValueError("min_learning_rate is larger than learning_rate")
        takes = SCHEDULES[self.schedule]
        for name, value in self.schedule_options or ():
            if value is not None and name not in takes:
                owner = next(schedule for schedule, names in SCHEDULES.items() if name in names)
                raise ValueError(
                    f"train.schedule_options.{name} belongs to the schedule {owner}, but train.schedule is "
                    f"{self.schedule}; leave it out, or set train.schedule to {owner}"
                )
        return self

    @property
    def replaced(self) -> tuple[str, ...]:
        """What is set and not used, because another field takes its place; in words."""
        notes = []
        if self.max_steps is not None and self.epochs is not None:
            notes.append(f"train.max_steps={self.max_steps} takes the place of train.epochs={self.epochs:g}")
        if self.min_learning_rate and self.schedule == "constant":
            notes.append(
                f"train.schedule=constant takes the place of train.min_learning_rate={self.min_learning_rate:g}"
            )
        ratio = self.warmup_ratio
        if self.warmup_steps is not None and ratio != TrainConfig.model_fields["warmup_ratio"].default:
            notes.append(f"train.warmup_steps={self.warmup_steps} takes the place of train.warmup_ratio={ratio:g}")
        return tuple(notes)
