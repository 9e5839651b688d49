"""Which metric chooses, and what evaluation in training cannot be asked for; all of it without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.config.tasks import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from finray.errors import ConfigError, DataError, FinrayError
from finray.planning.checks import check_evaluation
from finray.planning.resolve import require_whole_weights
from finray.planning.steps import require_prompts

OWN = "tests.unit.config.test_evaluation:letters"


def letters(answers: list[str], references: list[str]) -> float:
    return 0.0


def config(evaluation: dict[str, Any], **others: Any) -> Any:
    plain = {"model": {"name": "m"}, "data": {"source": "d", "eval_ratio": 0.1}, "evaluation": evaluation}
    return build_config({**plain, **others}, source="test")


@pytest.mark.parametrize(
    ("evaluation", "chosen"),
    [
        ({}, ("eval_loss", "min")),
        ({"metric": "perplexity"}, ("perplexity", "min")),
        ({"metric": "perplexity", "metric_mode": "max"}, ("perplexity", "max")),
        ({"metric_mode": "max"}, ("eval_loss", "max")),
        ({"metric": "exact_match", "generate_rows": 4}, ("exact_match", "max")),
        ({"metric": "letters", "generate_rows": 4, "metrics": [OWN], "metric_mode": "max"}, ("letters", "max")),
        ({"metric": "wer", "generate_rows": 4, "metrics": [f"{__name__}:wer"]}, ("wer", "min")),
        ({"metric": "no_error", "generate_rows": 4, "metrics": [f"{__name__}:no_error"]}, ("no_error", "max")),
        ({"metric": "json_f1", "generate_rows": 4, "metrics": ["json_f1"]}, ("json_f1", "max")),
    ],
)
def test_the_metric_that_chooses_and_its_direction(evaluation: dict[str, Any], chosen: tuple[str, str]) -> None:
    made = config(evaluation)
    check_evaluation(made)
    assert CAUSAL_LM.chosen(made.evaluation) == chosen


def wer(answers: list[str], references: list[str]) -> float:
    return 0.0


def no_error(answers: list[str], references: list[str]) -> float:
    return 1.0


wer.higher_is_better = False  # type: ignore[attr-defined]
no_error.higher_is_better = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "metrics",
    [
        *([f"m:{name}"] for name in ("loss", "lr", "tokens", "step", "kind", "time", "eval_mine", "perplexity")),
        ["m:score", "n:score"],
        ["rougeL", "m:rougeL"],
    ],
)
def test_a_metric_does_not_take_the_place_of_another_number(metrics: list[str]) -> None:
    with pytest.raises(ConfigError, match="would take the place of the other") as caught:
        check_evaluation(config({"metrics": metrics}))
    assert caught.value.where == "evaluation.metrics"
    # Control: names of their own.
    check_evaluation(config({"metrics": ["m:score", "n:my_score", "json_f1", "exact_match"]}))


def test_what_is_better_is_asked_for_where_nothing_says_it() -> None:
    outside = replace(CAUSAL_LM, metrics=None, best=("accuracy", "max"))
    for metric, mode in (("accuracy", "max"), ("f1_macro", "max"), ("mean_error", "min"), ("rmse", "min")):
        assert outside.chosen(config({"metric": metric}).evaluation) == (metric, mode)
    own = {"metric": "letters", "generate_rows": 4, "metrics": [OWN]}
    for spec, evaluation in ((outside, {"metric": "goodness"}), (CAUSAL_LM, own)):
        with pytest.raises(ConfigError, match="whether less or more of") as caught:
            spec.chosen(config(evaluation).evaluation)
        assert caught.value.where == f"evaluation.metric={evaluation['metric']}"
        assert "evaluation.metric_mode=min or max" in str(caught.value.repair)
        # A run from elsewhere is evaluated without importing what it names.
        assert spec.metric(config(evaluation).evaluation) == evaluation["metric"]


@pytest.mark.parametrize(
    ("evaluation", "where", "parts"),
    [
        (
            {"metric": "accuracy"},
            "evaluation.metric=accuracy",
            ("has no metric `accuracy`", "eval_loss, perplexity or,"),
        ),
        # Answers are not asked for.
        ({"metric": "exact_match"}, "evaluation.metric=exact_match", ("with evaluation.generate_rows, one of",)),
        (
            {"metric": "perplexty", "generate_rows": 1},
            "evaluation.metric=perplexty",
            ("did you mean `perplexity`?", "use one of: eval_loss, perplexity, exact_match"),
        ),
        (
            {"generate_rows": 1, "metrics": ["multiple_choice"]},
            "evaluation.metrics",
            ("during training only answers are available",),
        ),
        ({"generate_rows": 1, "metrics": ["bertscore"]}, "evaluation.scoring.encoder", ("none is set",)),
    ],
)
def test_what_there_is_not_is_found_on_the_cpu(evaluation: dict[str, Any], where: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_evaluation(config(evaluation))
    assert caught.value.where == where
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("field", ["metric", "generate_rows", "every_steps"])
def test_without_held_out_rows_there_is_nothing_to_ask_for(field: str) -> None:
    value = "perplexity" if field == "metric" else 3
    with pytest.raises(FinrayError, match=rf"evaluation\.{field}: there are no evaluation rows"):
        config({field: value}, data={"source": "d"})
    config({field: value})


def test_rows_that_are_learned_as_a_whole_have_no_prompts() -> None:
    with pytest.raises(FinrayError, match=r"with data\.train_on: all there are no prompts"):
        config({"generate_rows": 2}, data={"source": "d", "eval_ratio": 0.1, "train_on": "all"})
    with pytest.raises(DataError) as caught:
        require_prompts(config({"generate_rows": 2}), "text")
    assert caught.value.where == "evaluation.generate_rows"
    require_prompts(config({"generate_rows": 2}), "chat")
    require_prompts(config({"generate_rows": 2}), "unpaired")
    check_evaluation(config({"generate_rows": 2}, train={"objective": "kto"}))
    require_prompts(config({}), "text")


def test_a_classifier_has_metrics_of_its_own_and_of_each_class() -> None:
    for metric, mode in (
        ("f1_macro", "max"),
        ("precision_not bad", "max"),
        ("recall_error", "max"),
        ("mean_squared_error", "min"),
    ):
        assert SEQUENCE_CLASSIFICATION.chosen(config({"metric": metric}).evaluation) == (metric, mode)
    with pytest.raises(ConfigError, match="did you mean `accuracy`"):
        SEQUENCE_CLASSIFICATION.chosen(config({"metric": "acuracy"}).evaluation)


def test_a_task_without_answers_is_not_asked_for_them() -> None:
    model = {"name": "m", "task": "sequence_classification"}
    for asked in ({"generate_rows": 2}, {"metrics": ["rougeL"]}):
        with pytest.raises(ConfigError, match="sequence_classification does not answer prompts") as caught:
            check_evaluation(config(asked, model=model))
        assert caught.value.where == f"evaluation.{next(iter(asked))}"
        check_evaluation(config({"metrics": ["rougeL"]}))
    check_evaluation(config({}, model=model))


@pytest.mark.parametrize(
    ("strategy", "parallel", "refused"),
    [
        ("ddp", {}, False),
        ("fsdp", {}, True),
        ("deepspeed", {"strategy": "deepspeed", "zero_stage": 3}, True),
        ("deepspeed", {"strategy": "deepspeed", "zero_stage": 2}, False),
    ],
)
def test_workers_that_share_weights_answer_nothing_inline(
    strategy: str, parallel: dict[str, Any], refused: bool
) -> None:
    resolved = Resolved("fp32", None, None, packs=True, strategy=strategy, use_gpu=False)
    inline = config({"generate_rows": 2}, parallel=parallel)
    if refused:
        with pytest.raises(ConfigError) as caught:
            require_whole_weights(inline, resolved)
        assert caught.value.where == "evaluation.generate_rows"
        assert "set evaluation.mode to async" in str(caught.value)
    else:
        require_whole_weights(inline, resolved)
    require_whole_weights(config({"generate_rows": 2, "mode": "async"}, parallel=parallel), resolved)
    require_whole_weights(config({}, parallel=parallel), resolved)
