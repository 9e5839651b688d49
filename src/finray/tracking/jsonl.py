"""Metrics as JSON lines, one record a line, in ``metrics.jsonl``: the run's own record of every step."""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.errors import CheckpointError
from finray.files import LINE_BYTES, Appending, lines_of, loads, opened, replacing
from finray.records import Metrics, TrainRecord
from finray.tracking.protocol import RunInfo

if TYPE_CHECKING:
    import pandas

FILE = "metrics.jsonl"


class JsonlTracker:
    """Appends records to ``<run>/metrics.jsonl``.

    Unlike other trackers it is never left out: what a full disk refuses is held and written when there is room.

    Args:
        warn: called about damaged lines, and when the file cannot be written, or can be again.
        now: the time, in seconds since 1970.
    """

    def __init__(
        self, warn: Callable[[str], None] = lambda message: None, now: Callable[[], float] = time.time
    ) -> None:
        self._warn = warn
        self._now = now

    @property
    def is_behind(self) -> bool:
        """Whether records are held that could not be written."""
        return bool(self._file.waiting or self._file.lost)

    def start(self, run: RunInfo) -> None:
        """Drop records after the step to resume at: those steps will run again.

        The file is replaced, not truncated, so that a leftover process of an earlier start keeps writing to the old
        one. An unreadable file is set aside: a run is worth more than its records. Raises CheckpointError: the file
        cannot be written.
        """
        self._path = path = run.run_dir / FILE
        aside = path.with_name(f"damaged-{FILE}")
        damaged = []
        try:
            with replacing(path) as stream:
                for line, record in self._readable(path):
                    if record is None:
                        damaged.append(line)
                    # A run that starts over evaluates again.
                    elif record["step"] <= run.resume_step and (run.resume_step or record["kind"] != "eval"):
                        stream.write(line)
                if damaged:
                    kept = Appending(aside)
                    kept.append(b"".join(damaged))
                    kept.close()
        except OSError as error:
            raise self._refused(error) from None
        if damaged:
            self._warn(
                f"{path}: {len(damaged):,} damaged line{'s' if len(damaged) > 1 else ''} set aside in {aside.name}"
            )
        self._file = Appending(path)

    def _readable(self, path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        try:
            yield from _lines(path)
        except OSError as error:
            aside = path.with_name(f"damaged-{FILE}-{uuid.uuid4().hex[:8]}")
            os.replace(path, aside)
            self._warn(
                f"{path} cannot be read ({error.strerror}): it was moved to {aside.name}, and a new one was started"
            )

    def log(self, record: Metrics) -> None:
        """Append one record; it has been passed to the operating system when this returns, or is held."""
        plain = record.json()
        # System records have their own time of sampling.
        plain.setdefault("time", round(self._now(), 3))
        # The metrics of a task from outside may be numbers of another library.
        line = json.dumps(plain, default=_plain) + "\n"
        was_behind = self.is_behind
        try:
            self._file.append(line.encode())
        except OSError as error:
            if not was_behind:
                self._warn(
                    f"{self._path} cannot be written: {_reason(error)}; its records are held in memory and written as "
                    "soon as that is possible; if it is not by the next checkpoint, the run ends there"
                )
        else:
            if was_behind and not self.is_behind:
                self._warn(f"{self._path} can be written again, and has every record")

    def keep(self) -> None:
        """Write every record to the disk: a checkpoint must not be ahead of the records.
        Raises CheckpointError: that failed."""
        was_behind = self.is_behind
        try:
            self._file.write(durably=True)
        except OSError as error:
            raise self._refused(error) from None
        if self._file.lost:
            raise self._refused(OSError(errno.ENOSPC, "records had to wait too long for room on the disk"))
        if was_behind:
            self._warn(f"{self._path} can be written again, and has every record")

    def finish(self) -> None:
        """Close the file."""
        try:
            self._file.write()
        except OSError as error:
            held = self._file.waiting + self._file.lost
            self._warn(
                f"{self._path} cannot be written: {_reason(error)}; the last {held:,} records are lost: a start from "
                "the last checkpoint does their steps again"
            )
        self._file.close()

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the run's records could not be written: {_reason(error)}",
            where=str(self._path),
            repair="free some disk space or fix the permissions; the same command then continues from the last "
            "checkpoint",
        )


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _plain(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def metrics_table(run_dir: Path) -> pandas.DataFrame:
    """The training records of a run by step, with evaluations as additional columns: ``eval/<name>``, as trackers
    have it, for a metric that has the name of a column of training."""
    import pandas

    records = list(read_records(run_dir / FILE))
    columns = {field.name for field in fields(TrainRecord)}.union(*(one for one in records if one["kind"] == "train"))
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if (kind := record.pop("kind")) in ("train", "eval"):
            record.pop("time", None)
            row = rows.setdefault(record.pop("step"), {})
            for name, value in record.items():
                row[f"eval/{name}" if kind == "eval" and name in columns else name] = value
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("step").sort_index()


def mean_loss(run_dir: Path) -> float | None:
    """The mean loss over all targets of a run, each at the time it was trained on; None without records."""
    weight = total = 0.0
    # A file that cannot be read must not keep a run from being finished.
    with suppress(OSError):
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


def read_whole(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Records of a file, if it exists, and the number of damaged lines, which are skipped."""
    parsed_lines = [record for _, record in _lines(path)]
    records = [record for record in parsed_lines if record is not None]
    return records, len(parsed_lines) - len(records)


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
    with opened(path, path.parent) as stream:
        stream.seek(offset)
        for line in lines_of(stream):
            record = parsed(line)
            if record is not None or line.endswith(b"\n") or len(line) == LINE_BYTES:
                yield line.removesuffix(b"\n") + b"\n", record


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is damaged."""
    try:
        record = loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**63 else None
