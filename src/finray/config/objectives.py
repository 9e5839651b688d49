"""The objectives by name, and what can be said of them without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finray.config.adapter_files import SETTINGS
from finray.config.extensions import load_named
from finray.config.resume_adapter import with_start
from finray.config.schema import AdapterConfig, Config
from finray.config.tasks import OF_RECORDS, Mode, Output, TaskSpec, task_spec
from finray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """An objective as the rooms that load no model see it."""

    name: str  # as ``train.objective``
    reads: Output  # what it is a function of
    # What takes the place of the task's own: kinds of prepared rows, the metric that chooses the best checkpoint, and
    # the names of all metrics. None for the task's.
    rows: frozenset[str] | None = None
    best: tuple[str, Mode] | None = None
    metrics: tuple[str, ...] | None = None
    # Names of sums beside the loss; a step records their means.
    means: tuple[str, ...] = ()
    # Whether rows are learned from in groups (pairs), which no pass may tear.
    in_groups: bool = False
    # Names of columns that the reference computes: by default the model that the run begins from, before training.
    columns: tuple[str, ...] = ()
    # Whether a head's one output is a number that the model gives a row, for which no labels are read.
    is_reward: bool = False
    # Names of sums over the global batch that a pass without gradients computes before the losses of a step.
    before: tuple[str, ...] = ()
    # Whether a step takes so many rows, which are then packed, and not so many packs.
    counts_rows: bool = False


SFT = ObjectiveSpec("sft", reads="cross_entropy")
CLASSIFICATION = ObjectiveSpec("classification", reads="logits")
_REWARDS = ("margin", "accuracy", "chosen_reward", "rejected_reward")
_OF_PAIRS = (*_REWARDS, "chosen_logprob", "rejected_logprob")
ORPO = ObjectiveSpec(
    "orpo",
    reads="log_probabilities",
    rows=frozenset({"preference"}),
    metrics=("eval_loss", *_OF_PAIRS),
    means=_OF_PAIRS,
    in_groups=True,
)
SIMPO = replace(ORPO, name="simpo")
DPO = replace(ORPO, name="dpo", columns=("reference",))
REWARD = replace(ORPO, name="reward", reads="logits", metrics=("eval_loss", *_REWARDS), means=_REWARDS, is_reward=True)
_OF_ANSWERS = (
    *("desirable_reward", "undesirable_reward", "margin", "accuracy", "kl"),
    *("desirable_logprob", "undesirable_logprob"),
)
KTO = ObjectiveSpec(
    "kto",
    reads="log_probabilities",
    rows=frozenset({"unpaired"}),
    metrics=("eval_loss", *_OF_ANSWERS),
    means=_OF_ANSWERS,
    columns=("reference",),
    before=("kl", "answers"),
    counts_rows=True,
)
OBJECTIVES = {spec.name: spec for spec in (SFT, CLASSIFICATION, DPO, ORPO, SIMPO, REWARD, KTO)}


def objective_spec(config: Config) -> ObjectiveSpec:
    """The spec of a run's objective; of one from outside finray, the attribute ``spec`` of its class.
    Raises ConfigError: there is no such objective, or it reads what the task's forward pass does not give."""
    task, name, where = task_spec(config.model.task), objective_name(config), "train.objective"
    spec = OBJECTIVES[name] if name in OBJECTIVES else getattr(objective_class(name), "spec", None)
    if not isinstance(spec, ObjectiveSpec):
        repair = "docs/guide/extending.md shows how an objective is written"
        raise ConfigError(f"`{name}` is no objective: it has no `spec`", where=where, repair=repair)
    if taken := sorted(OF_RECORDS & set(spec.means)):
        repair = "give the mean a name of its own"
        raise ConfigError(f"`{taken[0]}` is another number in the records of a run", where=where, repair=repair)
    if spec.reads not in task.gives:
        raise ConfigError(
            f"`{name}` is a function of {spec.reads}, and a model with the task {task.name} gives "
            f"{' and '.join(sorted(task.gives))}",
            where=where,
            repair="leave model.task out: the objective has its own"
            if name in OBJECTIVES and name != "sft"
            else "leave it out for the task's own objective, or change model.task",
        )
    return spec


def objective_name(config: Config) -> str:
    """What a run's objective is called in the config, or by its task."""
    return config.train.objective or task_spec(config.model.task).objective


def objective_class(name: str) -> Any:
    """The class that implements :class:`finray.objectives.base.Objective` for ``train.objective``; imports torch.
    Raises ConfigError: there is no such objective."""
    return load_named("finray.objectives", name, where="train.objective")


def spec_of(config: Config) -> TaskSpec:
    """The spec of a run's task, with the rows and the metrics of its objective.
    Raises ConfigError: as :func:`task_spec` and :func:`objective_spec`."""
    task, objective = task_spec(config.model.task), objective_spec(config)
    return replace(
        task,
        rows=objective.rows or task.rows,
        best=objective.best or task.best,
        metrics=objective.metrics or task.metrics,
        reads_labels=task.reads_labels and not objective.is_reward,
        objective=objective.name,
    )


def reference_run(config: Config) -> Config | None:
    """The config of a run that begins from the reference, where that is a model of its own in memory; None where it is
    the run's model, with its adapter as it was or without.
    Raises ConfigError: the adapter that is named cannot be continued."""
    settings, adapter, model = config.preference, config.adapter, config.model
    if not objective_spec(config).columns:
        return None
    if not settings.names_model:
        # The first values of other methods may change the model.
        changes = adapter.start_from is None and adapter.method not in ("lora", "rslora", "dora", "pissa")
        own = adapter.method == "none" or (changes and settings.reference == "start")
        return config if settings.reference_in_step and own else None
    folder = Path(settings.reference).expanduser()
    if any((place / SETTINGS).is_file() for place in (folder, folder / "final")):
        return with_start(config.model_copy(update={"adapter": AdapterConfig(start_from=settings.reference)}))
    # Under a new adapter the weights are stored, and the layers computed, as the run's own are.
    plain = AdapterConfig(method="none") if adapter.method == "none" else AdapterConfig(rank=1)
    named = model.model_copy(update={"name": settings.reference, "revision": None})
    return config.model_copy(update={"model": named, "adapter": plain})


def keeps_start(config: Config) -> bool:
    """Whether a frozen copy of the adapter that the run begins from is the reference in its steps."""
    settings, start = config.preference, config.adapter.start_from
    has_columns = bool(objective_spec(config).columns)
    return has_columns and settings.reference_in_step and settings.reference == "start" and start is not None


def model_of_reference(config: Config) -> str:
    """What the reference is, in a sentence."""
    named = {"start": "the model that the run begins from", "base": "the base model"}
    return named.get(config.preference.reference, config.preference.reference)
