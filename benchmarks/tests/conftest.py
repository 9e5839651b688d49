"""The benchmarks are scripts: their tests import them from their folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return importlib.import_module
