"""What a resume needs besides weights and moments: counters, the cursor, the schedule, the random key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from finray.errors import CheckpointError
from finray.files import FileKind, typed

FOLDER = "training_state"
COUNTERS = f"{FOLDER}/state.json"
_FILES = FileKind(CheckpointError)


@dataclass
class TrainState:
    """Where a run stands.

    The cursor is one integer: steps take items from one stream over all epochs, across their borders too.

    Attributes:
        position: items of the data stream consumed (the cursor; the epoch follows from it).
        updates: updates the schedule has seen.
        total_steps: steps that the run was to have; 0 in files of older versions.
        random_key: key of all random streams.
        data: digest of all rows of the prepared dataset. The cursor means something in these rows only.
        tokens, supervised: tokens seen and targets learned from, over all ranks.
        seconds: training time so far, over all attempts.
        best: best value so far of the metric that chooses checkpoints (``TaskSpec.chosen``).
        metric: its name; empty in files of older versions.
        stale_evaluations: evaluations since the last gain, as ``evaluation.early_stopping`` sees it.
        evaluating: steps whose evaluation beside the training has not come to an end, ascending.
        loss_scale: factor of the loss in fp16; None before the first step, and in other dtypes.
        good_steps: steps since the scale was changed.
        skipped: updates skipped because gradients overflowed in fp16.
        skipped_in_row: those since the last update.
    """

    step: int = 0
    position: int = 0
    updates: int = 0
    total_steps: int = 0
    random_key: int = 0
    data: str = ""
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best: float | None = None
    metric: str = ""
    stale_evaluations: int = 0
    evaluating: list[int] = field(default_factory=list)
    loss_scale: float | None = None
    good_steps: int = 0
    skipped: int = 0
    skipped_in_row: int = 0

    def advance(self, *, items: int, tokens: int, supervised: int) -> None:
        """Count a step."""
        self.step += 1
        self.updates += 1
        self.position += items
        self.tokens += tokens
        self.supervised += supervised

    def evaluated(self, value: float, mode: Literal["min", "max"], *, min_gain: float) -> bool:
        """Count an evaluation; returns whether its value is the best so far."""
        gain = float("inf") if self.best is None else (self.best - value if mode == "min" else value - self.best)
        self.stale_evaluations = 0 if gain > min_gain else self.stale_evaluations + 1
        if gain > 0:
            self.best = value
        return gain > 0

    def text(self) -> str:
        """The content of its file in a checkpoint."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, folder: Path) -> TrainState:
        """Read it from a checkpoint directory.

        Raises:
            CheckpointError: the directory has no training state, or one of another shape.
        """
        path = folder / COUNTERS
        with _FILES.reading(path):
            plain = _FILES.json(path, dict[str, Any])
            if "best_eval_loss" in plain:
                # Written by finray 0.1 before there was a second task.
                plain["best"] = plain.pop("best_eval_loss")
            if unknown := sorted(plain.keys() - {one.name for one in fields(cls)}):
                # Of another version, to which they mean something.
                raise _FILES.refused(f"has keys that are not known here: {', '.join(unknown)}", path)
            return typed(plain, cls)
