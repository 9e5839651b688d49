"""The tables of the scaling guide are those that its formulas give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def scaling() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_script(scaling: Any) -> None:
    # Made by: python benchmarks/scaling.py --write
    assert scaling.tables() in scaling.PAGE.read_text(encoding="utf-8")


def test_a_ring_by_hand(scaling: Any) -> None:
    """70B under fsdp on 64 GPUs in 8 machines at 400 Gb/s: each machine gets all weights twice, and sends gradients."""
    found = scaling.outcome("70B", "full", "fsdp", 64, 400)
    shape = scaling.blueprint("70B", "full")
    layers = shape.layer * shape.layers
    moved = 4 * (2 * (shape.parameters + layers) + 4 * shape.parameters)
    network, inside = moved * 7 / 8 / 50e9, moved * 7 / 8 / 450e9
    assert found.compute + found.shown == pytest.approx(network + inside, rel=1e-9)
    assert scaling.outcome("70B", "full", "ddp", 64, 400) is None
