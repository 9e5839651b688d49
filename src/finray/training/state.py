"""The training state besides weights and moments: counters, data cursor, schedule, random key."""

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
    """Progress of a run.

    The cursor is one integer: steps take items from one stream that spans all epochs.

    Attributes:
        position: items of the data stream consumed (the cursor; the epoch follows from it).
        total_steps: planned steps of the run; 0 in files of older versions.
        random_key: seed of all random streams.
        data: digest of all rows of the prepared dataset. The cursor is only valid for these rows.
        reference: digest of the files of the model that the objective compares with; empty for one without files here.
        tokens, supervised: tokens seen and targets trained on, over all ranks.
        seconds: training time so far, over all attempts.
        best: best value so far of the metric that selects checkpoints (``TaskSpec.chosen``).
        metric, metric_mode: its name, and whether less or more of it is better; empty in files of older versions.
        counted: the last value that counted as a gain, from which the next gain is measured; with a smallest gain of 0
            it is the best.
        stale_evaluations: evaluations since the last gain, for ``evaluation.early_stopping``.
        evaluating: steps with a pending asynchronous evaluation, ascending.
        loss_scale: loss scale in fp16; None before the first step, and for other dtypes.
        good_steps: steps since the scale was changed.
        skipped: updates skipped because gradients overflowed in fp16.
        skipped_in_row: skipped updates since the last successful one.
    """

    step: int = 0
    position: int = 0
    total_steps: int = 0
    random_key: int = 0
    data: str = ""
    reference: str = ""
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best: float | None = None
    counted: float | None = None
    metric: str = ""
    metric_mode: str = ""
    stale_evaluations: int = 0
    evaluating: list[int] = field(default_factory=list)
    loss_scale: float | None = None
    good_steps: int = 0
    skipped: int = 0
    skipped_in_row: int = 0

    def advance(self, *, items: int, tokens: int, supervised: int) -> None:
        """Count a step."""
        self.step += 1
        self.position += items
        self.tokens += tokens
        self.supervised += supervised

    def evaluated(self, value: float, mode: Literal["min", "max"], *, min_gain: float) -> bool:
        """Count an evaluation; returns whether its value is the best so far."""

        def gain(over: float | None) -> float:
            return float("inf") if over is None else over - value if mode == "min" else value - over

        # Many small gains add up to one that counts. Older files have only the best.
        counted = self.best if self.counted is None else self.counted
        if gain(counted) > min_gain:
            self.counted, self.stale_evaluations = value, 0
        else:
            self.counted, self.stale_evaluations = counted, self.stale_evaluations + 1
        is_best = gain(self.best) > 0
        if is_best:
            self.best = value
        return is_best

    def text(self) -> str:
        """The content of the state file in a checkpoint."""
        # Earlier versions take the position in the schedule from `updates`.
        return json.dumps({"updates": self.step, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, folder: Path) -> TrainState:
        """Read the state from a checkpoint directory.
        Raises CheckpointError: the directory has no training state, or one of another shape."""
        path = folder / COUNTERS
        with _FILES.reading(path):
            plain = _FILES.json(path, dict[str, Any])
            plain.pop("updates", None)
            if "best_eval_loss" in plain:
                # Written by finray 0.1 before there was a second task.
                plain["best"] = plain.pop("best_eval_loss")
            if unknown := sorted(plain.keys() - {item.name for item in fields(cls)}):
                # Written by another version, which uses them.
                raise _FILES.refused(f"has keys that are not known here: {', '.join(unknown)}", path)
            return typed(plain, cls)
