"""Metrics as JSON lines, one record a line, in ``metrics.jsonl``: the run's own record of every step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.records import Metrics
from finray.tracking.base import RunInfo

if TYPE_CHECKING:
    import pandas

FILE = "metrics.jsonl"


class JsonlTracker:
    """Appends records to ``<run>/metrics.jsonl``."""

    def start(self, run: RunInfo) -> None:
        """Drop what was logged after the step to resume at: those steps will be done again.

        The file is replaced, not cut, so that a process left over from an earlier start keeps writing to the old one.
        """
        path = run.run_dir / FILE
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        with scratch.open("w", encoding="utf-8") as stream:
            for record in read_records(path):
                # A run that begins anew evaluates anew.
                if record.get("step", 0) <= run.resume_step and (run.resume_step or record.get("kind") != "eval"):
                    stream.write(json.dumps(record) + "\n")
        os.replace(scratch, path)
        self._stream = path.open("a", encoding="utf-8")

    def log(self, record: Metrics) -> None:
        """Append one record; it is the operating system's when this returns."""
        self._stream.write(json.dumps(record.json()) + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Close the file."""
        self._stream.close()


def metrics_table(run_dir: Path) -> pandas.DataFrame:
    """The records of a run by step: those of training, with evaluations in the columns beside them."""
    import pandas

    rows: dict[int, dict[str, Any]] = {}
    for record in read_records(run_dir / FILE):
        if record.pop("kind", None) in ("train", "eval"):
            rows.setdefault(record.pop("step"), {}).update(record)
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("step").sort_index()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file; a last line that a killed process left unfinished is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
