"""The section ``evaluation``, and what scores are told of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from finray.config.extensions import named
from finray.config.section import PositiveInt, Section


class ScoringConfig(Section):
    """Settings of single scores."""

    encoder: str | None = Field(
        None, description="`bertscore`: directory or Hub id of the encoder whose hidden states are compared."
    )
    encoder_layer: PositiveInt | None = Field(
        None,
        description="`bertscore`: the layer that is compared. null takes the one that bert-score takes where finray "
        "knows it, else the last.",
    )
    choices: list[str] = Field(
        default_factory=list,
        description="`multiple_choice`: possible answers to every row, where rows have no column `choices`.",
    )
    checker: str | None = Field(
        None,
        description="`pass_at_k`: your function that says whether an answer is right, as `package.module:function`. It "
        "is given the answer and the source row.",
    )
    run_code: bool = Field(
        False,
        description="`pass_at_k`: call the checker, which runs what a model wrote. Each call is a process of its own "
        "with limits of time and memory; it is no sandbox.",
    )
    k: PositiveInt = Field(1, description="`pass_at_k`: tries of which one must be right.")
    attempts: PositiveInt = Field(
        1, description="`pass_at_k`: answers to each prompt, at least `k`; several need a temperature above 0."
    )
    seconds: float = Field(10.0, gt=0, description="`pass_at_k`: time for one answer.")
    memory_mb: PositiveInt = Field(2048, description="`pass_at_k`: memory for one answer, in MiB.")


class EarlyStoppingConfig(Section):
    """When a run stops before its last step."""

    patience: PositiveInt = Field(3, description="Stop after this many consecutive evaluations without improvement.")
    min_gain: float = Field(
        0.0,
        ge=0,
        description="By how much `evaluation.metric` must be better than its best value (a loss lower, an accuracy "
        "higher) to count as an improvement.",
    )


class EvaluationConfig(Section):
    """Evaluation during training, and `finray evaluate` after it."""

    every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations. null evaluates at the start and at the end only."
    )
    every_epochs: float | None = Field(
        None,
        gt=0,
        description="Passes over the data between evaluations, such as 1 or 0.25. Where it is set, `every_steps` is "
        "not used.",
    )
    on_start: bool = Field(
        True,
        description="Also evaluate before the first step: the loss of the model that training starts from. It has no "
        "part in `early_stopping` and the best checkpoint.",
    )
    mode: Literal["inline", "async"] = Field(
        "inline",
        description="Who evaluates: the training workers, between two steps (`inline`), or a Ray task with the "
        "checkpoint just written, on what one worker more would have, while training goes on (`async`).",
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None,
        description="Stop the run when `metric` no longer improves: `{patience: 3, min_gain: 0.001}`.",
    )
    metric: str | None = Field(
        None,
        description="The metric that chooses the best checkpoint (`checkpoint.keep_best`, `final/`) and stops a run "
        "early: one of the task's, such as `eval_loss` or `perplexity`, or, with `generate_rows`, one of `metrics`. "
        "null is the task's own choice (`eval_loss`).",
    )
    metric_mode: Literal["min", "max"] | None = Field(
        None,
        description="Whether less (`min`) or more (`max`) of `metric` is better. null goes by its name: less is better "
        "of a loss, a perplexity and an error, more of everything else.",
    )
    metrics: list[Annotated[str, AfterValidator(named("finray.metrics"))]] = Field(
        default_factory=lambda: ["exact_match"],
        description="Scores of answers, by name or as `package.module:function`: in `finray evaluate`, and in training "
        "with `generate_rows`.",
    )
    scoring: ScoringConfig | None = Field(None, description="Settings of single scores: `{encoder: roberta-large}`.")
    max_rows: PositiveInt | None = Field(
        None,
        description="Evaluate a sample of at most this many rows: the same at every evaluation, chosen by `run.seed`. "
        "A larger sample holds the rows of a smaller one.",
    )
    generate_rows: PositiveInt | None = Field(
        None,
        description="Held-out prompts that the model answers, greedily, at each evaluation in training. `metrics` of "
        "the answers then stand beside the loss. null answers none.",
    )
    max_new_tokens: PositiveInt = Field(128, description="Maximum tokens generated per answer.")
    batch_size: PositiveInt = Field(16, description="`finray evaluate`: prompts per batch.")
