"""Metrics as TensorBoard event files."""

from __future__ import annotations

import json
from typing import Any

import yaml

from finray.config.identity import flatten
from finray.records import Metrics, SystemRecord
from finray.tracking.jsonl import totals
from finray.tracking.protocol import RunInfo

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes the numbers of each record as scalars ``<kind>/<name>`` to ``<run>/tensorboard/``, the config as text and
    as hyperparameters."""

    def start(self, run: RunInfo) -> None:
        """Open the event files; TensorBoard hides records of an earlier start after the step to resume at."""
        from torch.utils.tensorboard import summary, writer

        # These functions are untyped.
        begin_writing: Any = writer.SummaryWriter
        make: Any = summary.hparams
        self._writer = begin_writing(str(run.run_dir / FOLDER), purge_step=run.resume_step and run.resume_step + 1)
        self._run_dir, self._step = run.run_dir, run.resume_step
        text = yaml.safe_dump(run.config, sort_keys=False)
        # Markdown shows indented text verbatim.
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), run.resume_step)
        values = {path: _plain(value) for path, value in flatten(run.config).items() if value is not None}
        # In these files: `add_hparams` would create others, which TensorBoard shows as another run.
        begin, values_now, self._end = make(values, {"train/loss": 0.0, "eval/eval_loss": 0.0})
        for event in (begin, values_now):
            self._writer.file_writer.add_summary(event)

    def log(self, record: Metrics) -> None:
        """Write one record."""
        self._step = max(self._step, record.step)
        plain = record.json()
        at = record.time if isinstance(record, SystemRecord) else None
        for name, value in plain.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self._writer.add_scalar(f"{plain['kind']}/{name}", value, plain["step"], at)

    def finish(self) -> None:
        """Flush and close."""
        try:
            for name, value in totals(self._run_dir).items():
                self._writer.add_scalar(name, value, self._step)
        finally:
            self._writer.file_writer.add_summary(self._end)
            self._writer.close()


def _plain(value: Any) -> str | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
