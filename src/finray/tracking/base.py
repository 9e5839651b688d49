"""What a tracker is."""

from __future__ import annotations

from typing import Any, Protocol


class Tracker(Protocol):
    """Takes records: flat dictionaries of plain values with ``kind`` (train, eval) and ``step``."""

    def log(self, record: dict[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Finish writing."""
