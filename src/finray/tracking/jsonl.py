"""Metrics as JSON lines, one record a line, in ``metrics.jsonl``: the run's own record of every step."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.records import Metrics

if TYPE_CHECKING:
    import pandas

    from finray.tracking.base import RunInfo

FILE = "metrics.jsonl"


class JsonlTracker:
    """Appends records to ``<run>/metrics.jsonl``.

    Args:
        warn: called about damaged lines.
        now: the time, in seconds since 1970.
    """

    def __init__(
        self, warn: Callable[[str], None] = lambda message: None, now: Callable[[], float] = time.time
    ) -> None:
        self._warn = warn
        self._now = now

    def start(self, run: RunInfo) -> None:
        """Drop records after the step to resume at: those steps will run again.

        The file is replaced, not truncated, so that a leftover process of an earlier start keeps writing to the old
        one. An unreadable file is set aside: a run is worth more than its records.
        """
        path = run.run_dir / FILE
        aside = path.with_name(f"damaged-{FILE}")
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        damaged = []
        with scratch.open("wb") as stream:
            try:
                for line, record in _lines(path):
                    if record is None:
                        damaged.append(line)
                    # A run that starts over evaluates again.
                    elif record["step"] <= run.resume_step and (run.resume_step or record["kind"] != "eval"):
                        stream.write(line)
            except OSError as error:
                aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
                os.replace(path, aside)
                self._warn(
                    f"{path} cannot be read ({error.strerror}): it was moved to {aside.name}, and a new one was started"
                )
        if damaged:
            with aside.open("ab") as kept:
                kept.writelines(damaged)
            self._warn(
                f"{path}: {len(damaged):,} damaged line{'s' if len(damaged) > 1 else ''} set aside in {aside.name}"
            )
        os.replace(scratch, path)
        self._stream = path.open("a", encoding="utf-8")

    def log(self, record: Metrics) -> None:
        """Append one record; it has been passed to the operating system when this returns."""
        plain = record.json()
        # System records have their own time of sampling.
        plain.setdefault("time", round(self._now(), 3))
        self._stream.write(json.dumps(plain) + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Close the file."""
        self._stream.close()


def metrics_table(run_dir: Path) -> pandas.DataFrame:
    """The training records of a run by step, with evaluations as additional columns."""
    import pandas

    rows: dict[int, dict[str, Any]] = {}
    for record in read_records(run_dir / FILE):
        if record.pop("kind") in ("train", "eval"):
            record.pop("time", None)
            rows.setdefault(record.pop("step"), {}).update(record)
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("step").sort_index()


def mean_loss(run_dir: Path) -> float | None:
    """The mean loss over all targets of a run, each at the time it was trained on; None without records."""
    weight = total = 0.0
    for record in read_records(run_dir / FILE):
        supervised, loss = record.get("supervised"), record.get("loss")
        # What is no number was not written by finray, or damaged since.
        if record["kind"] == "train" and type(supervised) is int and isinstance(loss, int | float):
            weight += supervised
            total += supervised * loss
    return total / weight if weight else None


def totals(run_dir: Path) -> dict[str, float]:
    """What trackers are told at the end of a run, by name."""
    mean = mean_loss(run_dir)
    return {} if mean is None else {"train/mean_loss": mean}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, if it exists; damaged lines, and those left unfinished by a killed process, are skipped."""
    return (record for _, record in _lines(path) if record is not None)


def read_from(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Complete records of a growing file, from a byte offset on, each with the offset after it."""
    for line, record in _lines(path, offset):
        offset += len(line)
        if record is not None:
            yield record, offset


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Lines of a file with the record in each; None if it is damaged. An unfinished line is ignored."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        stream.seek(offset)
        for line in stream:
            record = parsed(line)
            if record is not None or line.endswith(b"\n"):
                yield line.removesuffix(b"\n") + b"\n", record


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if fits else None
