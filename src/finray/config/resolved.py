"""The resolved value of every ``auto`` in a config, computed once by the driver and passed to all processes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Problem = Literal["single_label", "multi_label", "regression"]


# In the place of a name of Transformers: the model's own attention, which gets each packed row alone.
BY_ROW = "by row"


@dataclass(frozen=True, slots=True)
class LabelSet:
    """What a classifier predicts: the kind of problem, and the names of the classes by id (none in a regression)."""

    problem: Problem
    names: tuple[str, ...]


# What a reward model's head is for: a number.
REWARD = LabelSet("regression", ())


@dataclass(frozen=True)
class Execution:
    """The decisions of a run that do not depend on its data: how the model computes, and on what.

    Workers that decided for themselves could differ from each other, or from those of the start before. So nothing
    outside of ``planning/`` reads an ``auto`` of these.
    """

    precision: Precision  # dtype of the forward and backward pass
    # Bits of the stored weights of frozen linear layers; None for the dtype of ``precision``.
    bits: Literal[4, 8] | None
    # Transformers' name of the attention over packed rows, or `BY_ROW`; None for the model's own, without packing.
    attention: str | None
    packs: bool  # whether rows may share a forward pass
    strategy: str  # as ``parallel.strategy``, never ``auto``
    use_gpu: bool  # whether each worker has a GPU
    # Here and below: what runs had whose files are older than a field, where their configs did not say.
    liger: bool = False  # whether Liger's kernels are used
    weights: Literal["fp32", "bf16"] = "fp32"  # dtype in which weights that are trained are kept
    learning_rate: float = 2e-4  # the peak of the schedule

    @property
    def is_told(self) -> bool:
        """Whether rows share a forward pass, and finray's attention is told where they end."""
        return self.packs and self.attention != BY_ROW


@dataclass(frozen=True)
class Steps:
    """How the training rows form steps: decided once the data are prepared, by :func:`finray.data.dataset.run_data`."""

    global_batch_size: int = 8  # packs (or rows) per optimizer step
    epochs: float = 1.0  # passes over the data, where ``train.max_steps`` is not set
    pack_length: int | None = None  # tokens that a pack holds at most; None for ``data.max_length``
    micro_batch_size: int = 1  # packs (or rows) per forward pass of a worker


@dataclass(frozen=True)
class Resolved(Steps, Execution):
    """All decisions that the config of a run may leave open, as its ``resolved.json`` has them."""

    problem: Problem | None = None  # what a classifier predicts; None for another task
    labels: tuple[str, ...] = ()  # names of its classes, in the order of their ids; none in a regression
    class_weights: tuple[float, ...] = ()  # of these classes in the loss; none where all have the same

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
    """Whether rows of a model may share a forward pass; :mod:`finray.models.packing_check` finds out."""

    safe: bool  # whether they may
    family: str  # the architecture, as its configuration names it
    reason: str = ""  # why not, where they may not
    # Most tokens of a row, where the model learned a vector for each position; None for no such limit.
    positions: int | None = None
    hidden_size: int | None = None  # width of the model; None where its configuration does not say
    by_row: bool = False  # whether the model's own attention computes each row alone, and all else packed rows
    has_states: bool = False  # whether layers carry a state from token to token, which no cached keys and values hold
    # Whether a row may be padded on its left, which moves positions that are counted (BART), and what some masks leave.
    pads: bool = False
    lasting: bool = True  # False where the check failed for lack of memory or of a package, and another time may not

    @property
    def is_told(self) -> bool:
        """Whether finray's attention serves, which is told where rows end."""
        return self.safe and not self.by_row

    @property
    def warning(self) -> str:
        """What to tell the user of a model whose rows may not be packed."""
        return f"{self.family} cannot be packed safely: {self.reason}; a forward pass has rows of one length"
