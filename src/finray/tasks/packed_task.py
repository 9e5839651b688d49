"""What tasks share whose forward pass is over packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finray.config.objectives import keeps_start, objective_class, objective_name, objective_spec
from finray.config.resolved import Execution, LabelSet
from finray.config.schema import Config
from finray.models.loading import build_model
from finray.models.packed import CalledAsOne, PackedModel
from finray.models.saved_layout import SavedLayout
from finray.models.targets import described
from finray.objectives.base import Objective


def objective_of(config: Config, execution: Execution, *, device: torch.device) -> Any:
    """The objective of a run. Raises ConfigError: there is no such objective, or the task does not go with it."""
    objective_spec(config)
    return objective_class(objective_name(config)).build(config, execution, device=device)


def built(
    config: Config,
    execution: Execution,
    *,
    device: torch.device,
    seed: int,
    on_meta: bool,
    labels: LabelSet | None = None,
) -> Any:
    """The model of a task with its adapter, as the run decided; of a classifier for these labels.
    Raises ModelError: it cannot be loaded."""
    return build_model(
        config.model,
        config.adapter,
        precision=execution.precision,
        attention_name=execution.attention,
        bits=execution.bits,
        seed=seed,
        device=device,
        on_meta=on_meta,
        weights=execution.weights,
        labels=labels,
        keeps_start=keeps_start(config),
    )


class PackedTask:
    """The model's part of :class:`finray.training.task.Task`.

    Attributes:
        adapted: what the adapter is on, where that is not all linear layers.
        in_step: as :class:`finray.training.task.Task` has it.

    Args:
        packed: the model.
        objective: what it is trained for.
        compute: what is called with a batch inside of what a strategy wraps.
    """

    in_step: Callable[[Any], Any] | None = None

    def __init__(self, packed: PackedModel, objective: Objective, compute: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.objective = objective
        self.model = packed.model
        self.layout = SavedLayout(packed.model)
        self.module: torch.nn.Module = CalledAsOne(packed.model, compute)
        # Of the whole model: later it may be sharded.
        self.adapted = described(self.model)
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
        self._counts = sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def __init_subclass__(cls) -> None:
        # Such a task was written before there were objectives, and would be trained for something else.
        if moved := sorted({"loss_sum", "weight", "score", "metric_count", "metrics"} & cls.__dict__.keys()):
            raise TypeError(f"`{moved[0]}` of {cls.__name__} belongs to an objective (train.objective)")

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def initialized_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that got their values here and not from a file: trained ones, and those of a frozen
        adapter."""
        named = self.model.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad or ".lora_" in name]

    def outputs(self, batch: Any) -> torch.Tensor:
        """What the forward pass gives, under the strategy."""
        result: torch.Tensor = self.module(batch)
        return result

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters."""
        return self._counts
