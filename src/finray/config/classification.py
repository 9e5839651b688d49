"""The section `classification`: what a classifier learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from finray.config.resolved import Problem
from finray.config.section import Ratio, Section


def _name(value: Any) -> Any:
    """YAML reads `no` as a boolean and `1` as a number; labels are names, as the data write them."""
    if isinstance(value, bool):
        raise ValueError(
            f"holds {str(value).lower()}: YAML reads yes, no, on and off as booleans; put the name in quotes"
        )
    return str(value) if isinstance(value, int) else value


class ClassificationConfig(Section):
    """What `model.task: sequence_classification` predicts."""

    problem: Problem | None = Field(
        None,
        description="One class per row (`single_label`), any number of classes (`multi_label`), or a number "
        "(`regression`). null detects it from the labels: names, whole numbers and booleans are classes, lists are "
        "`multi_label`, and numbers with decimals `regression`.",
    )
    labels: list[Annotated[str, BeforeValidator(_name)]] | None = Field(
        None,
        description="Names of the classes, in the order of their ids. Whole numbers in the data are ids into this "
        "list. null uses the names of a `ClassLabel` feature, else those in the training data: numbers by value, "
        "then names alphabetically.",
    )
    class_weights: Literal["balanced"] | dict[Annotated[str, BeforeValidator(_name)], float] | None = Field(
        None,
        description="Weight of each class in the loss, by name; classes that are not listed have 1. `balanced` is "
        "rows / (classes * rows of the class), as in scikit-learn.",
    )
    label_smoothing: Ratio = Field(0.0, description="Share of the target probability that is spread over all classes.")

    @model_validator(mode="after")
    def _consistent(self) -> ClassificationConfig:
        labels, weights = self.labels, self.class_weights
        if labels is not None:
            if any(not name.strip() for name in labels) or len(set(labels)) < len(labels):
                raise ValueError("classification.labels: names must not be blank or repeated")
            if len(labels) < (1 if self.problem == "multi_label" else 2):
                raise ValueError("classification.labels: list at least two classes")
        if isinstance(weights, dict):
            if any(weight <= 0 for weight in weights.values()):
                raise ValueError("classification.class_weights: weights must be greater than 0")
            if labels is not None and (unknown := sorted(set(weights) - set(labels))):
                raise ValueError(
                    f"classification.class_weights: {', '.join(unknown)} not in classification.labels "
                    f"({', '.join(labels)})"
                )
        if self.problem == "regression":
            for name in ("labels", "class_weights", "label_smoothing"):
                if getattr(self, name):
                    raise ValueError(f"classification.{name} has no effect with classification.problem regression")
        return self
