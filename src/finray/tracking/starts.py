"""Every start of a run's workers, in ``starts.jsonl``: when, from which step, on what, and with which versions.

``metrics.jsonl`` begins again at the step from which a run goes on, so it cannot tell that there was a restart; this
file can.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finray.files import typed
from finray.records import Metrics, RunHeader
from finray.tracking.base import RunInfo

FILE = "starts.jsonl"
_PACKAGES = ("finray", "torch", "transformers", "peft", "ray", "deepspeed", "bitsandbytes")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the workers.

    Attributes:
        time: seconds since 1970.
        versions: of Python and the packages that compute.
        header: what is trained on what; its ``step`` is the one that the workers started from.
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
        """Append the start."""
        found = Start(round(self._clock(), 3), versions(), run.header)
        with (run.run_dir / FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(found)) + "\n")

    def log(self, record: Metrics) -> None:
        """Records are in another file."""

    def finish(self) -> None:
        """Nothing is open."""


def read_starts(run_dir: Path) -> list[Start]:
    """The starts of a run in their order, if they are known; damaged lines are passed over.

    Raises:
        OSError: the file cannot be read.
    """
    path, found = run_dir / FILE, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            plain: dict[str, Any] = json.loads(line)
            found.append(typed(plain, Start))
        except (ValueError, RecursionError):
            continue
    return found


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute, where they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
