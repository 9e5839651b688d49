"""The tasks by name, and what can be said of them without torch: plan, preparation and checks read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from finray.config.extensions import load_named


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task as the rooms that load no model see it.

    Attributes:
        name: as ``model.task``.
        rows: kinds of prepared rows that it learns from (``chat``, ``completion``, ``text``, ``labelled``).
        auto_class: Transformers' class that loads its models.
        peft_type: PEFT's ``TaskType``.
        best: the metric that chooses the best checkpoint and stops a run early, and whether less or more is better.
        reads_labels: whether ``data.format: auto`` is text with a label, and the model is made for the labels in it.
    """

    name: str
    rows: frozenset[str]
    auto_class: str
    peft_type: str
    best: tuple[str, Literal["min", "max"]]
    reads_labels: bool = False


CAUSAL_LM = TaskSpec(
    "causal_lm",
    rows=frozenset({"chat", "completion", "text"}),
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    best=("eval_loss", "min"),
)
SEQUENCE_CLASSIFICATION = TaskSpec(
    "sequence_classification",
    rows=frozenset({"labelled"}),
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    best=("eval_loss", "min"),
    reads_labels=True,
)
SPECS = {spec.name: spec for spec in (CAUSAL_LM, SEQUENCE_CLASSIFICATION)}


def task_class(name: str) -> Any:
    """The class that implements :class:`finray.training.task.Task` for ``model.task``; imports torch.

    Raises:
        ConfigError: there is no such task.
    """
    return load_named("finray.tasks", name, where="model.task")


def task_spec(name: str) -> TaskSpec:
    """The spec of a task; of one from outside finray, the attribute ``spec`` of its class.

    Raises:
        ConfigError: there is no such task.
    """
    if name in SPECS:
        return SPECS[name]
    spec: TaskSpec = task_class(name).spec
    return spec
