"""What scores are told of their own: the section ``evaluation.scoring``."""

from __future__ import annotations

from pydantic import Field

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
