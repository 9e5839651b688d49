"""A storage in memory for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a run is."""
    return f"memory://{tmp_path.name}-{id(tmp_path)}/runs/run"
