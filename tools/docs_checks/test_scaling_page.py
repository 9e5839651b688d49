"""The tables of the scaling guide are those that its formulas give."""

from __future__ import annotations

import pytest
from tools import scaling_page as scaling


def test_the_page_has_the_tables_of_the_script() -> None:
    # Made by: python -m tools.scaling_page --write
    assert scaling.tables() in scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.goodput.tables() in scaling.PAGE.read_text(encoding="utf-8")


def test_a_ring_by_hand() -> None:
    """70B under fsdp on 64 GPUs in 8 machines at 400 Gb/s: each machine gets all weights twice, and sends gradients."""
    found = scaling.outcome("70B", "full", "fsdp", 64, 400)
    shape = scaling.blueprint("70B", "full")
    layers = shape.layer * shape.layers
    moved = 4 * (2 * (shape.parameters + layers) + 4 * shape.parameters)
    network, inside = moved * 7 / 8 / 50e9, moved * 7 / 8 / 450e9
    assert found.compute + found.shown == pytest.approx(network + inside, rel=1e-9)
    assert scaling.outcome("70B", "full", "ddp", 64, 400) is None
