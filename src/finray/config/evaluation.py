"""Evaluation during and after training."""

from __future__ import annotations

from pydantic import Field

from finray.config.section import PositiveInt, Section


class EarlyStoppingConfig(Section):
    """When a run ends before its last step."""

    patience: PositiveInt = Field(3, description="Evaluations in a row without a gain after which the run ends.")
    min_gain: float = Field(0.0, ge=0, description="How far the loss must fall below its lowest value to be a gain.")


class EvaluationConfig(Section):
    """Evaluation during training, and `finray evaluate` after it."""

    every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations; null for the end only."
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None,
        description="End the run when the evaluation loss has stopped falling: `{patience: 3, min_gain: 0.001}`.",
    )
    max_rows: PositiveInt | None = Field(None, description="Evaluate at most this many rows.")
    max_new_tokens: PositiveInt = Field(128, description="Tokens generated per answer by `finray evaluate`.")
    batch_size: PositiveInt = Field(16, description="Prompts generated at a time by `finray evaluate`.")
