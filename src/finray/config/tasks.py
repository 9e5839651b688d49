"""The tasks by name, and what can be said of them without torch: plan, preparation and checks read it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from finray.config.evaluation import EvaluationConfig
from finray.config.extensions import TABLES, load_named
from finray.config.resolved import Problem
from finray.errors import ConfigError, did_you_mean

Mode = Literal["min", "max"]
# What a forward pass gives: the summed cross-entropy of the K targets (a scalar, for which no logits are kept), their
# log-probabilities (K), or a head's logits for each row (S, C).
Output = Literal["cross_entropy", "log_probabilities", "logits"]
# Names of other numbers in records and in the results of an evaluation (a test compares them).
OF_RECORDS = frozenset(
    (
        *("kind", "step", "time", "epoch", "loss", "grad_norm", "lr", "tokens", "supervised", "samples_digest"),
        *("tokens_per_s", "data_wait_s", "peak_memory_bytes", "seconds", "loss_scale", "skipped", "samples"),
        *("confusion", "perplexity", "message"),
    )
)
# A metric with such a word in its name is better the less it is.
_LESS_IS_BETTER = {"loss", "perplexity", "error", "mse", "rmse", "mae"}


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task as the rooms that load no model see it, with the objective that it is trained for."""

    name: str  # as ``model.task``
    # Kinds of prepared rows that it learns from (``chat``, ``completion``, ``text``, ``labelled``).
    rows: frozenset[str]
    auto_class: str  # Transformers' class that loads its models
    peft_type: str  # PEFT's ``TaskType``
    # The metric that chooses the best checkpoint and stops a run early, and whether less or more is better; what
    # ``evaluation.metric`` names takes its place.
    best: tuple[str, Mode]
    # Whether ``data.format: auto`` is text with a label, and the model is made for the labels in it.
    reads_labels: bool = False
    # Names of all metrics, with `*` for those of classes; None where only an evaluation tells.
    metrics: tuple[str, ...] | None = None
    gives: frozenset[Output] = frozenset({"cross_entropy", "log_probabilities"})
    objective: str = "sft"  # where ``train.objective`` names none

    @property
    def adds_head(self) -> bool:
        """Whether its models have another head than a causal language model, which their files may lack."""
        return self.auto_class != CAUSAL_LM.auto_class

    def metric(self, evaluation: EvaluationConfig) -> str:
        """The metric that chooses the best checkpoint and stops a run early.
        Raises ConfigError: ``evaluation.metric`` is none of the task's, or one of ``evaluation.metrics`` has the
        name of another number."""
        named = [metric_name(name) for name in evaluation.metrics if ":" in name]
        taken = {
            *OF_RECORDS,
            self.best[0],
            *(self.metrics or ()),
            *(name for name in evaluation.metrics if ":" not in name),
        }
        for name in named:
            if name in taken or name.startswith("eval_") or named.count(name) > 1:
                reason = "two metrics have this name" if named.count(name) > 1 else "another number has this name"
                raise ConfigError(
                    f"`{name}`: {reason} in the records of a run, and one would take the place of the other",
                    where="evaluation.metrics",
                    repair="give your function a name of its own, such as `my_score`",
                )
        answers = [metric_name(name) for name in evaluation.metrics] if evaluation.generate_rows else []
        metric, metrics = evaluation.metric or self.best[0], [self.best[0], *(self.metrics or ())]
        if self.metrics is not None and not any(fnmatchcase(metric, pattern) for pattern in (*metrics, *answers)):
            choices = list(dict.fromkeys([*metrics, *answers]))
            scores = " or, with evaluation.generate_rows, one of evaluation.metrics" if not answers else ""
            raise ConfigError(
                f"{self.name} has no metric `{metric}`{did_you_mean(metric, choices)}",
                where=f"evaluation.metric={metric}",
                repair=f"use one of: {', '.join(choices)}{scores}",
            )
        return metric

    def chosen(self, evaluation: EvaluationConfig) -> tuple[str, Mode]:
        """That metric, and whether less or more of it is better. Imports a function of the user's that computes it.
        Raises ConfigError: as :meth:`metric`; or nothing says what is better."""
        metric = self.metric(evaluation)
        if evaluation.metric_mode is not None:
            return metric, evaluation.metric_mode
        if metric == self.best[0]:
            return self.best
        names = evaluation.metrics if evaluation.generate_rows else ()
        name = next((named for named in names if metric_name(named) == metric), metric)
        mode = mode_of(metric)
        if name != metric:
            more = getattr(load_named("finray.metrics", name, where="evaluation.metrics"), "higher_is_better", None)
            if isinstance(more, bool):
                mode = "max" if more else "min"
            elif mode == "max":
                mode = None
        if mode is None:
            raise ConfigError(
                f"whether less or more of `{metric}` is better is not known, so it cannot choose a checkpoint",
                where=f"evaluation.metric={metric}",
                repair="set evaluation.metric_mode=min or max"
                + (f", or the attribute `{metric}.higher_is_better` to False or True" if name != metric else ""),
            )
        return metric, mode


CAUSAL_LM = TaskSpec(
    "causal_lm",
    rows=frozenset({"chat", "completion", "text"}),
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    best=("eval_loss", "min"),
    metrics=("eval_loss", "perplexity"),
)
_OF_CLASSES = ("accuracy", "f1_macro", "f1_weighted", "precision_*", "recall_*", "roc_auc")
# Beside `eval_loss`; a star stands for the name of a class.
CLASSIFIER_METRICS: dict[Problem, tuple[str, ...]] = {
    "single_label": (*_OF_CLASSES, "matthews_corrcoef"),
    "multi_label": _OF_CLASSES,
    "regression": ("mean_squared_error", "pearson", "spearman"),
}
SEQUENCE_CLASSIFICATION = TaskSpec(
    "sequence_classification",
    rows=frozenset({"labelled"}),
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    best=("eval_loss", "min"),
    reads_labels=True,
    metrics=("eval_loss", *CLASSIFIER_METRICS["single_label"], *CLASSIFIER_METRICS["regression"]),
    gives=frozenset({"logits"}),
    objective="classification",
)
SPECS = {spec.name: spec for spec in (CAUSAL_LM, SEQUENCE_CLASSIFICATION)}
# The task of an objective that goes with no other, where ``model.task`` is left out.
TASK_OF = dict.fromkeys(("classification", "reward"), SEQUENCE_CLASSIFICATION.name)


def mode_of(metric: str) -> Mode | None:
    """Whether less or more of a metric is better, where its name says that: finray's own, and a loss or an error."""
    # The name of a class says nothing.
    if not metric.startswith(("precision_", "recall_")) and _LESS_IS_BETTER & set(metric.split("_")):
        return "min"
    patterns = [pattern for spec in SPECS.values() for pattern in spec.metrics or ()]
    is_ours = metric in TABLES["finray.metrics"] or any(fnmatchcase(metric, pattern) for pattern in patterns)
    return "max" if is_ours else None


def metric_name(name: str) -> str:
    """What a metric of ``evaluation.metrics`` is called where its value stands: a function without its module."""
    return name.rpartition(":")[2]


def task_class(name: str) -> Any:
    """The class that implements :class:`finray.training.task.Task` for ``model.task``; imports torch.
    Raises ConfigError: there is no such task."""
    return load_named("finray.tasks", name, where="model.task")


def task_spec(name: str) -> TaskSpec:
    """The spec of a task; of one from outside finray, the attribute ``spec`` of its class.
    Raises ConfigError: there is no such task."""
    if name in SPECS:
        return SPECS[name]
    spec = getattr(task_class(name), "spec", None)
    if not isinstance(spec, TaskSpec):
        raise ConfigError(
            f"`{name}` is no task: it has no `spec`",
            where="model.task",
            repair="docs/guide/extending.md shows how a task is written",
        )
    return spec
