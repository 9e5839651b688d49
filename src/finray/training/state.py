"""What a resume needs besides weights and moments: counters, the cursor, the schedule, the random key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from finray.errors import CheckpointError
from finray.training.optimizer import Optimizer

FOLDER = "training_state"
COUNTERS = "state.json"
MOMENTS = "optimizer.safetensors"


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

    def save(self, folder: Path, optimizer: Optimizer) -> None:
        """Write ``training_state/`` into a checkpoint directory."""
        target = folder / FOLDER
        target.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.state().items()}
        save_file(tensors, target / MOMENTS)
        (target / COUNTERS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, optimizer: Optimizer) -> TrainState:
        """Read ``training_state/`` of a checkpoint directory, and restore the optimizer from it.

        Raises:
            CheckpointError: the directory has no training state, or one of another shape.
        """
        source = folder / FOLDER
        try:
            values = json.loads((source / COUNTERS).read_text(encoding="utf-8"))
            state = cls(**values)
            optimizer.restore(load_file(source / MOMENTS))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the training state cannot be read: {error}", where=str(source)) from None
        return state
