"""What a resume needs besides weights and moments: counters, the cursor, the schedule, the random key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from finray.errors import CheckpointError

FOLDER = "training_state"
COUNTERS = f"{FOLDER}/state.json"


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        position: items of the data stream consumed (the cursor; the epoch follows from it).
        updates: updates the schedule has seen.
        random_key: key of all random streams.
        data: digest of the tokens of the prepared dataset.
        tokens: tokens seen, over all ranks.
        supervised: targets learned from, over all ranks.
        seconds: training time so far, over all attempts.
        best_eval_loss: lowest evaluation loss so far.
        stale_evaluations: evaluations since the last gain, as `evaluation.early_stopping` sees it.
        loss_scale: factor of the loss in fp16; None before, and in other arithmetic.
        good_steps: steps since the scale was changed.
        skipped: steps whose update was left out, because gradients were too large for fp16.
        skipped_in_row: those since the last update.
    """

    step: int = 0
    position: int = 0
    updates: int = 0
    random_key: int = 0
    data: str = ""
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best_eval_loss: float | None = None
    stale_evaluations: int = 0
    loss_scale: float | None = None
    good_steps: int = 0
    skipped: int = 0
    skipped_in_row: int = 0

    def text(self) -> str:
        """The content of its file in a checkpoint."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, folder: Path) -> TrainState:
        """Read it from a checkpoint directory.

        Raises:
            CheckpointError: the directory has no training state, or one of another shape.
        """
        try:
            return cls(**json.loads((folder / COUNTERS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the training state cannot be read: {error}", where=str(folder / FOLDER)) from None
