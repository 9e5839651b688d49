"""Keeps a process that was left over from an earlier attempt from writing into a run that has moved on."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from finray.errors import CheckpointError

FILE = "attempt"


class Fence:
    """The run belongs to whoever wrote the attempt file last.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Take the run over."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f".{FILE}.{self._token}")
        scratch.write_text(self._token, encoding="utf-8")
        os.replace(scratch, self._path)

    def check(self) -> None:
        """Make sure that nobody else has taken the run since.

        Raises:
            CheckpointError: somebody has.
        """
        if self._path.read_text(encoding="utf-8") != self._token:
            raise CheckpointError("another attempt has taken this run over", where=str(self._path.parent))
