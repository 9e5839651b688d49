"""The section ``evaluation``, and the settings of scores."""

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
        description="`bertscore`: the layer to compare. null uses bert-score's choice if finray knows it, else the "
        "last layer.",
    )
    choices: list[str] = Field(
        default_factory=list,
        description="`multiple_choice`: possible answers for every row, if rows have no column `choices`.",
    )
    checker: str | None = Field(
        None,
        description="`pass_at_k`: your function that decides whether an answer is correct, as "
        "`package.module:function`. It receives the answer and the source row.",
    )
    run_code: bool = Field(
        False,
        description="`pass_at_k`: allow calling the checker, which runs code that a model wrote. Each call is a "
        "separate process with limits on time and memory; it is not a sandbox.",
    )
    k: PositiveInt = Field(1, description="`pass_at_k`: number of attempts of which at least one must be correct.")
    attempts: PositiveInt = Field(
        1,
        description="`pass_at_k`: number of answers per prompt, at least `k`; more than one needs a temperature "
        "above 0.",
    )
    seconds: float = Field(10.0, gt=0, description="`pass_at_k`: time limit per answer.")
    memory_mb: PositiveInt = Field(2048, description="`pass_at_k`: memory limit per answer, in MiB.")


class EarlyStoppingConfig(Section):
    """When a run stops before its last step."""

    patience: PositiveInt = Field(3, description="Stop after this many consecutive evaluations without improvement.")
    min_gain: float = Field(
        0.0,
        ge=0,
        description="Smallest change of `evaluation.metric` that counts as an improvement, over the last value that "
        "counted as one: small gains add up.",
    )


class EvaluationConfig(Section):
    """Evaluation during training, and `finray evaluate` after it."""

    every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations. null evaluates only at the start and at the end."
    )
    every_epochs: float | None = Field(
        None,
        gt=0,
        description="Passes over the data between evaluations, such as 1 or 0.25. If it is set, `every_steps` is "
        "ignored.",
    )
    on_start: bool = Field(
        True,
        description="Also evaluate before the first step: the loss of the base model. It does not count for "
        "`early_stopping` and the best checkpoint.",
    )
    mode: Literal["inline", "async"] = Field(
        "inline",
        description="Where to evaluate: in the training workers between two steps (`inline`), or in a Ray task that "
        "loads the checkpoint just written, with the resources of one more worker, while training continues (`async`).",
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        None,
        description="Stop the run when `metric` no longer improves: `{patience: 3, min_gain: 0.001}`.",
    )
    metric: str | None = Field(
        None,
        description="The metric that chooses the best checkpoint (`checkpoint.keep_best`, `final/`) and stops a run "
        "early: one of the task's metrics, such as `eval_loss` or `perplexity`, or, with `generate_rows`, one of "
        "`metrics`. null is the task's default (`eval_loss`).",
    )
    metric_mode: Literal["min", "max"] | None = Field(
        None,
        description="Whether a lower (`min`) or a higher (`max`) value of `metric` is better. null "
        "knows finray's own metrics, a name with a loss, a perplexity or an error, and what the attribute "
        "`higher_is_better` of your function says; for any other it must be set.",
    )
    metrics: list[Annotated[str, AfterValidator(named("finray.metrics"))]] = Field(
        default_factory=lambda: ["exact_match"],
        description="Scores of answers, by name or as `package.module:function`: in `finray evaluate`, and in training "
        "with `generate_rows`.",
    )
    scoring: ScoringConfig | None = Field(None, description="Options of individual scores: `{encoder: roberta-large}`.")
    max_rows: PositiveInt | None = Field(
        None,
        description="Evaluate a sample of at most this many rows: the same at every evaluation, drawn with "
        "`run.seed`. A larger sample contains the smaller one.",
    )
    generate_rows: PositiveInt | None = Field(
        None,
        description="Number of held-out prompts that the model answers (greedily) at each evaluation during "
        "training, to compute `metrics` in addition to the loss. null answers none.",
    )
    max_new_tokens: PositiveInt = Field(128, description="Maximum tokens generated per answer.")
    batch_size: PositiveInt = Field(
        16, description="Prompts per batch, in `finray evaluate` and for answers during training."
    )
