"""Metrics as TensorBoard event files."""

from __future__ import annotations

from typing import Any

from finray.records import Metrics
from finray.tracking.base import RunInfo

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes the numbers of each record as scalars ``<kind>/<name>`` to ``<run>/tensorboard/``."""

    def start(self, run: RunInfo) -> None:
        """Open the event files; TensorBoard hides what an earlier start wrote after the step to resume at."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.run_dir / FOLDER), purge_step=run.resume_step and run.resume_step + 1)

    def log(self, record: Metrics) -> None:
        """Write one record."""
        plain = record.json()
        for name, value in plain.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{plain['kind']}/{name}", value, plain["step"])

    def finish(self) -> None:
        """Flush and close."""
        self._writer.close()
