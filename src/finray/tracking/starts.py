"""Records every start of a run's workers in ``starts.jsonl``: time, step, setup, and versions.

``metrics.jsonl`` is rewritten from the step at which a run continues, so it does not show restarts; this file does.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finray.files import Appending, lines_of, loads, opened, typed
from finray.records import Metrics, RunHeader
from finray.tracking.protocol import RunInfo

FILE = "starts.jsonl"
_PACKAGES = ("finray", "torch", "transformers", "peft", "ray", "deepspeed", "bitsandbytes")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the workers.

    Attributes:
        time: seconds since 1970.
        versions: of Python and the packages that compute.
        header: the run header; its ``step`` is the one that the workers started from.
    """

    time: float
    versions: Mapping[str, str]
    header: RunHeader


class StartsTracker:
    """Appends a line to ``<run>/starts.jsonl`` at each start.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def start(self, run: RunInfo) -> None:
        """Append this start."""
        start = Start(round(self._clock(), 3), versions(), run.header)
        self._file = Appending(run.run_dir / FILE)
        # Where a disk is full, it is written with a later record.
        with suppress(OSError):
            self._file.append(json.dumps(asdict(start)).encode() + b"\n")

    def log(self, record: Metrics) -> None:  # noqa: ARG002
        """Write what could not be written before; records are in another file."""
        with suppress(OSError):
            self._file.write()

    def finish(self) -> None:
        """Close the file."""
        self._file.write()
        self._file.close()


def read_starts(run_dir: Path) -> list[Start]:
    """The starts of a run in order, if known; damaged lines are skipped. Raises OSError: the file cannot be read."""
    path = run_dir / FILE
    starts: list[Start] = []
    if not path.exists():
        return []
    with opened(path, run_dir) as stream:
        for line in lines_of(stream):
            try:
                plain: dict[str, Any] = loads(line)
                starts.append(typed(plain, Start))
            except (ValueError, RecursionError):
                continue
    return starts


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that compute."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
