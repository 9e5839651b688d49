"""The resolved value of every ``auto`` in a config, computed once by the driver and passed to all processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Problem = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True)
class LabelSet:
    """What a classifier predicts: the kind of problem, and the names of the classes by id (none in a regression)."""

    problem: Problem
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The decisions of a run that its config may leave open.

    Workers that decided for themselves could differ from each other, or from those of the start before. So nothing
    outside of ``planning/`` reads an ``auto`` of these, or takes ``cluster.num_workers`` for the world size.

    Attributes:
        precision: dtype of the forward and backward pass.
        bits: bits of the stored weights of frozen linear layers; None for the dtype of ``precision``.
        attention: Transformers' name of the attention over packed rows; None for the model's own.
        packs: whether rows may share a forward pass.
        strategy: as ``parallel.strategy``, never ``auto``.
        world_size: training workers.
        use_gpu: whether each worker has a GPU.
        liger: whether Liger's kernels are used.
        global_batch_size: packs (or rows) per optimizer step.
        epochs: passes over the data, where ``train.max_steps`` is not set.
        weights: dtype in which weights that are trained are kept.
        learning_rate: the peak of the schedule.
        pack_length: tokens that a pack holds at most; None for ``data.max_length``.
        problem: what a classifier predicts; None for another task.
        labels: names of its classes, in the order of their ids; none in a regression.
        class_weights: of these classes in the loss; none where all have the same.
    """

    precision: Precision
    bits: Literal[4, 8] | None
    attention: str | None
    packs: bool
    strategy: str
    world_size: int
    use_gpu: bool
    # Files of runs that are older than these fields lack them.
    liger: bool = False
    # What they were for such runs where their configs did not say.
    global_batch_size: int = 8
    epochs: float = 1.0
    learning_rate: float = 2e-4
    weights: Literal["fp32", "bf16"] = "fp32"
    pack_length: int | None = None
    problem: Problem | None = None
    labels: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()

    @property
    def label_set(self) -> LabelSet | None:
        """What a classifier predicts; None for another task."""
        return None if self.problem is None else LabelSet(self.problem, self.labels)


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known of a run once its data are prepared.

    Attributes:
        prepared: directory or URL of the prepared dataset.
        resolved: with what the data decide: the size of a step, the epochs, and the classes.
    """

    prepared: str
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
