"""The ``evaluation`` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from finray.config.extensions import named
from finray.config.section import PositiveInt, Section


class EarlyStoppingConfig(Section):
    """When a run stops before its last step."""

    patience: PositiveInt = Field(3, description="Stop after this many consecutive evaluations without improvement.")
    min_gain: float = Field(
        0.0, ge=0, description="How far below its lowest value the loss must fall to count as an improvement."
    )


class EvaluationConfig(Section):
    """Evaluation during training, and `finray evaluate` after it."""

    every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations. null evaluates at the end only."
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None,
        description="Stop the run when the evaluation loss no longer improves: `{patience: 3, min_gain: 0.001}`.",
    )
    metrics: list[Annotated[str, AfterValidator(named("finray.metrics"))]] = Field(
        default_factory=lambda: ["exact_match"],
        description="Scores of the answers in `finray evaluate`, by name or as `package.module:function`.",
    )
    max_rows: PositiveInt | None = Field(None, description="Evaluate at most this many rows.")
    max_new_tokens: PositiveInt = Field(128, description="`finray evaluate`: maximum tokens generated per answer.")
    batch_size: PositiveInt = Field(16, description="`finray evaluate`: prompts per batch.")
