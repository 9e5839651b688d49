"""Which weights are trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finray.config.section import PositiveInt, Ratio, Section


class AdapterConfig(Section):
    """Which weights are trained."""

    method: Literal["none", "lora", "rslora", "dora", "pissa"] = Field(
        "lora",
        description="`none` trains every weight, the others adapters: LoRA, with rank-stabilised scaling (rsLoRA), "
        "with magnitudes of their own (DoRA), or begun at the principal parts of the weights (PiSSA).",
    )
    rank: PositiveInt = Field(16, description="Rank r of the LoRA matrices.")
    alpha: float = Field(
        32.0, gt=0, description="LoRA scaling numerator; updates are scaled by alpha / rank (rsLoRA: by its root)."
    )
    dropout: Ratio = Field(0.0, description="Dropout on the input of the LoRA matrices.")
    target_modules: str | list[str] = Field(
        "all-linear", description="`all-linear`, a regular expression, or a list of module name endings."
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="Endings of the names of modules that are trained whole beside the adapter."
    )
    start_from: str | None = Field(
        None,
        description="Directory of a PEFT adapter (or of a run) to go on from; method, rank, alpha and targets are its "
        "own.",
    )
    lora_plus_ratio: float = Field(
        1.0, ge=1.0, description="The B matrices learn this many times as fast as `train.learning_rate` (LoRA+)."
    )
