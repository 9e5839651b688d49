"""The resolved value of every ``auto`` in a config, computed once by the driver and passed to all processes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Problem = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True)
class LabelSet:
    """What a classifier predicts: the kind of problem, and the names of the classes by id (none in a regression)."""

    problem: Problem
    names: tuple[str, ...]


@dataclass(frozen=True)
class Execution:
    """The decisions of a run that do not depend on its data: how the model computes, and on what.

    Workers that decided for themselves could differ from each other, or from those of the start before. So nothing
    outside of ``planning/`` reads an ``auto`` of these.

    Attributes:
        precision: dtype of the forward and backward pass.
        bits: bits of the stored weights of frozen linear layers; None for the dtype of ``precision``.
        attention: Transformers' name of the attention over packed rows; None for the model's own.
        packs: whether rows may share a forward pass.
        strategy: as ``parallel.strategy``, never ``auto``.
        use_gpu: whether each worker has a GPU.
        liger: whether Liger's kernels are used.
        weights: dtype in which weights that are trained are kept.
        learning_rate: the peak of the schedule.
    """

    precision: Precision
    bits: Literal[4, 8] | None
    attention: str | None
    packs: bool
    strategy: str
    use_gpu: bool
    # Here and below: what runs had whose files are older than a field, where their configs did not say.
    liger: bool = False
    weights: Literal["fp32", "bf16"] = "fp32"
    learning_rate: float = 2e-4


@dataclass(frozen=True)
class Steps:
    """How the training rows form steps: decided once the data are prepared, by :func:`finray.data.dataset.run_data`.

    Attributes:
        global_batch_size: packs (or rows) per optimizer step.
        epochs: passes over the data, where ``train.max_steps`` is not set.
        pack_length: tokens that a pack holds at most; None for ``data.max_length``.
    """

    global_batch_size: int = 8
    epochs: float = 1.0
    pack_length: int | None = None


@dataclass(frozen=True)
class Resolved(Steps, Execution):
    """All decisions that the config of a run may leave open, as its ``resolved.json`` has them.

    Attributes:
        problem: what a classifier predicts; None for another task.
        labels: names of its classes, in the order of their ids; none in a regression.
        class_weights: of these classes in the loss; none where all have the same.
    """

    problem: Problem | None = None
    labels: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, execution: Execution, steps: Steps, labels: LabelSet | None = None, class_weights: tuple[float, ...] = ()
    ) -> Resolved:
        """Both parts together, with what a classifier predicts."""
        problem, names = (None, ()) if labels is None else (labels.problem, labels.names)
        # Each may be a `Resolved` itself, of an earlier start.
        known = {field.name: getattr(execution, field.name) for field in fields(Execution)}
        known |= {field.name: getattr(steps, field.name) for field in fields(Steps)}
        return cls(**known, problem=problem, labels=names, class_weights=class_weights)

    @property
    def label_set(self) -> LabelSet | None:
        """What a classifier predicts; None for another task."""
        return None if self.problem is None else LabelSet(self.problem, self.labels)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose data are prepared: where they are (directory or URL), and all that was decided."""

    location: str
    resolved: Resolved


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether rows of a model may share a forward pass; :mod:`finray.models.packing_check` finds out.

    Attributes:
        safe: whether they may.
        family: the architecture, as its configuration names it.
        reason: why not, where they may not.
        positions: most tokens of a row, where the model learned a vector for each position; None for no such limit.
        hidden_size: width of the model; None where its configuration does not say.
        lasting: False where the check failed for lack of memory or of a package, and another time may not.
    """

    safe: bool
    family: str
    reason: str = ""
    positions: int | None = None
    hidden_size: int | None = None
    lasting: bool = True

    @property
    def warning(self) -> str:
        """What to tell the user of a model whose rows may not be packed."""
        return f"{self.family} cannot be packed safely: {self.reason}; a forward pass has rows of one length"
