"""One rank is asked to stop, and all stop at one step, with a checkpoint from which the run continues bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain


def ask_rank_1_in_the_third_step(assembled: Any, run_dir: Path) -> None:
    loop = assembled.loop
    if run_dir.name == "stopped" and loop.strategy.rank == 1 and loop.state.step == 0:
        loop.has_request = lambda: loop.state.step == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed", marks=pytest.mark.nightly)])
def test_ranks_stop_together(
    strategy: str, tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path
) -> None:
    changes = {"train.max_steps": 6, "adapter.dropout": 0.2, "parallel.strategy": strategy, "cluster.num_workers": 2}
    plain = tiny_run(changes, model=dropout_model)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_all([(plain, whole), (plain, stopped)], world_size=2, look=ask_rank_1_in_the_third_step)
    assert [path.name for path in stopped.glob("checkpoint-*")] == ["checkpoint-000003"]
    run_all([(plain, stopped)], world_size=2, look=ask_rank_1_in_the_third_step)
    assert runs.trace(stopped) == runs.trace(whole)
    weights = [runs.adapter_weights(folder / "checkpoint-000006") for folder in (stopped, whole)]
    assert runs.relative_difference(*weights) == 0
