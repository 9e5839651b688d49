"""The records of a run: one frozen type per kind of record.

``metrics.jsonl`` holds them as flat JSON objects (docs/formats.md); trackers and the console take them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from finray.config.redact import redact_text
from finray.files import typed

# As JSON has it, in which records travel.
Confusion = list[list[int]]


@dataclass(frozen=True, slots=True)
class Note:
    """Something said in words, after an optimizer step; a ``warning`` is what a user should look at."""

    message: str
    step: int = 0
    level: Literal["note", "warning"] = "note"

    def __post_init__(self) -> None:
        # Notes quote errors of trackers, services and users' own code, and go to every screen, log and tracker.
        object.__setattr__(self, "message", redact_text(self.message))

    def json(self) -> dict[str, Any]:
        """The record as it is written."""
        return {"kind": self.level, "step": self.step, "message": self.message}


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far the preparation of data has come: parts done and in all, source rows read, tokens written."""

    done: int
    total: int
    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What is trained on what, at each start of the workers.

    Attributes:
        step: optimizer steps done before this start.
        parameters: of model and adapter.
        rows, tokens, supervised: of the training split; supervised tokens are targets of the loss, or rows that are.
        packs: packs, or rows without packing.
        fill: share of the packs' positions that hold a token.
        device: name of the GPU, or ``CPU``.
        global_batch_size: packs (or rows) per optimizer step.
        micro_batch_size: packs (or rows) per forward pass.
        accumulation: forward passes per optimizer step and worker.
        method: what is trained how, in words: adapter, optimizer, learning rate, strategy.
        epochs: passes over the data in the whole run.
        held_out: rows for evaluation; ``eval_rows`` of them are evaluated.
        workers: of each, by rank, the ranks that torch's launchers give it, and its host; in words.
        labelled: each row has a label, and no token is a target.
        evaluates: the workers evaluate before the first step.
        in_groups: rows belong together, and a step takes groups of them, such as pairs; there are ``packs``.
    """

    step: int
    total_steps: int
    model: str
    parameters: int
    trainable: int
    precision: str
    rows: int
    tokens: int
    supervised: int
    eval_rows: int
    packing: bool
    packs: int
    fill: float
    world_size: int
    device: str
    threads: int
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    method: str = ""
    epochs: float = 0.0
    held_out: int = 0
    workers: Sequence[str] = ()
    labelled: bool = False
    evaluates: bool = False
    in_groups: bool = False


@dataclass(frozen=True, slots=True)
class TrainRecord:
    """An optimizer step, or the steps since the record before."""

    step: int
    epoch: float  # passes over the data so far
    loss: float  # mean per target
    grad_norm: float | None  # before clipping; None where fp16 overflowed and the update was skipped
    lr: float
    tokens: int  # seen since the run began, over all ranks
    supervised: int  # targets since the record before
    samples_digest: str  # equal for two steps exactly when they saw the same rows in the same order
    tokens_per_s: float
    data_wait_s: float  # seconds spent waiting for data
    peak_memory_bytes: int
    seconds: float  # training time since the run began
    loss_scale: float | None = None
    skipped: int | None = None  # updates skipped so far, with fp16
    samples: tuple[int, ...] | None = None  # rows seen, with ``tracking.record_samples``
    means: Mapping[str, float] = field(default_factory=dict)  # of the objective, by name

    def json(self) -> dict[str, Any]:
        """The record as it is written; fields that a run does not have are left out."""
        optional = ("loss_scale", "skipped", "samples")
        kept = {name: value for name, value in asdict(self).items() if name not in optional or value is not None}
        return {"kind": "train", **kept, **kept.pop("means")}

    def without_samples(self) -> TrainRecord:
        """The record for those who show it and have no use for a long list."""
        return self if self.samples is None else replace(self, samples=None)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """An evaluation: the task's metrics (``eval_loss``, ...), which are means over so many targets.

    ``confusion`` is a classifier's: rows by their class and the predicted one; empty of other tasks and many classes.
    """

    step: int
    metrics: Mapping[str, float]
    targets: int
    seconds: float
    confusion: Confusion = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """The record as it is written."""
        counts = {"eval_targets": self.targets, "eval_seconds": self.seconds}
        matrix = {"confusion": self.confusion} if self.confusion else {}
        return {"kind": "eval", "step": self.step, **self.metrics, **counts, **matrix}

    @staticmethod
    def metrics_of(plain: Mapping[str, Any]) -> dict[str, float]:
        """The metrics in what :meth:`json` gave."""
        others = ("kind", "step", "eval_targets", "eval_seconds", "confusion", "time")
        return {name: value for name, value in plain.items() if name not in others}


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """How far an evaluation after this step has come: ``part`` is what it does, ``share`` how much of that is done."""

    step: int
    part: str
    share: float


@dataclass(frozen=True, slots=True)
class SystemRecord:
    """What rank 0's machine was doing: numbers by name, taken at a ``time`` in seconds since 1970."""

    step: int
    time: float
    numbers: Mapping[str, float]

    def json(self) -> dict[str, Any]:
        """The record as it is written."""
        return {"kind": "system", "step": self.step, **self.numbers, "time": self.time}


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself to the driver every few seconds; see :class:`finray.training.pulse.Pulse`.

    ``step`` is -1 while it loads. ``phase`` is ``gone`` where it has ended in order, and ``lost`` where its connection
    broke, which it makes again if it lives. ``node`` is Ray's name of its machine. ``part`` and ``share`` are those of
    :class:`EvalProgress` during an evaluation.
    """

    attempt: str
    rank: int
    host: str
    pid: int
    node: str
    step: int = 0
    phase: str = "other"
    steps: int = 0
    work_s: float = 0.0
    longest_s: float = 0.0
    part: str = ""
    share: float = 0.0


# What trackers take, and what the driver is told.
Metrics = TrainRecord | EvalRecord | SystemRecord | Note
Record = TrainRecord | EvalRecord | EvalProgress | Note | RunHeader | PrepareProgress


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished run says of itself; ``summary.json`` in the run directory."""

    step: int
    total_steps: int  # more than ``step`` where the run stopped early
    tokens: int
    supervised: int  # targets learned from, over all ranks
    train_seconds: float  # over all starts
    tokens_per_s: float
    first_loss: float | None  # of the first step of the last start, which is ``first_step``
    final_loss: float | None
    best_metric: str
    # Best value of ``best_metric``, which chose the best checkpoint; None where nothing was evaluated.
    best: float | None
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    peak_memory_bytes: tuple[int, ...] = ()  # by rank
    first_step: int = 1
    mean_loss: float | None = None  # mean per target over all steps of the run; None where its records are gone

    def json(self) -> dict[str, Any]:
        """The summary as it is written: the best value under ``best_<metric>``."""
        plain = asdict(self)
        metric, best = plain.pop("best_metric"), plain.pop("best")
        return {**plain, f"best_{metric}": best}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunSummary:
        """Read what :meth:`json` gave. Raises ValueError: it is something else."""
        rest = dict(plain)
        for key in [name for name in rest if name.startswith("best_")]:
            rest |= {"best": rest.pop(key), "best_metric": key.removeprefix("best_")}
        return typed(rest, cls)
