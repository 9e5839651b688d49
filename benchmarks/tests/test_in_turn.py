"""Contenders that take turns, as threads that read and write the FIFOs as `measuring.Turns` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def contender(name: str, steps: int, order: list[str], fails_at: int | None = None) -> Callable[[list[str]], Any]:
    def run(turns: list[str]) -> dict[str, Any]:
        mine, following = (os.open(fifo, os.O_RDWR) for fifo in turns)
        try:
            for step in range(steps):
                os.read(mine, 1)
                if step == fails_at:
                    raise ValueError(name)
                order.append(name)
                os.write(following, b".")
        finally:
            os.close(mine)
            os.close(following)
        return {"name": name}

    return run


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_contenders_do_a_step_each_in_turn(benchmark_module: Callable[[str], Any], tmp_path: Path, names: str) -> None:
    order: list[str] = []
    found = benchmark_module("processes").in_turn(tmp_path, {name: contender(name, 4, order) for name in names})
    assert order == list(names * 4)
    assert found == {name: {"name": name} for name in names}


def test_one_that_fails_is_the_error_and_nobody_waits_for_it(
    benchmark_module: Callable[[str], Any], tmp_path: Path
) -> None:
    order: list[str] = []
    contenders = {name: contender(name, 5, order, fails_at=1 if name == "b" else None) for name in "abc"}
    with pytest.raises(ValueError, match="b"):
        benchmark_module("processes").in_turn(tmp_path, contenders)
    assert order[:4] == ["a", "b", "c", "a"]
    assert (order.count("a"), order.count("b"), order.count("c")) == (5, 1, 5)
