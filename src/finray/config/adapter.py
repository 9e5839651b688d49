"""The ``adapter`` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from finray.config.extensions import named
from finray.config.section import PositiveInt, Ratio, Section


class AdapterConfig(Section):
    """Which weights are trained."""

    method: Annotated[str, AfterValidator(named("finray.adapter_methods", "none"))] = Field(
        "lora",
        description="Which weights are trained: all of them (`none`), or an adapter: LoRA, rank-stabilised LoRA "
        "(`rslora`), weight-decomposed LoRA (`dora`), or LoRA initialised from the principal singular vectors of the "
        "weights (`pissa`).",
    )
    rank: PositiveInt = Field(16, description="Rank r of the LoRA matrices.")
    alpha: float = Field(
        32.0,
        gt=0,
        description="LoRA scaling numerator: updates are scaled by alpha / rank (`rslora`: by alpha / sqrt(rank)).",
    )
    dropout: Ratio = Field(0.0, description="Dropout probability on the input of the LoRA matrices.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="Layers that get an adapter: `all-linear`, a regular expression, or a list of module name "
        "suffixes.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="Name suffixes of modules that are trained in full beside the adapter."
    )
    start_from: str | None = Field(
        None,
        description="Directory of a PEFT adapter, or of a finray run, to continue training from. Method, rank, alpha "
        "and target modules are read from it.",
    )
    lora_plus_ratio: float = Field(
        1.0,
        ge=1.0,
        description="LoRA+: learning rate of the B matrices as a multiple of `train.learning_rate`.",
    )
