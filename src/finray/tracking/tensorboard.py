"""Metrics as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """Writes the numbers of each record as scalars ``<kind>/<name>``.

    Args:
        folder: the log directory.
        resume_step: TensorBoard hides what an earlier attempt wrote after this step.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        """Write one record."""
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
