"""The head of a Ray is killed: the run ends in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import gated, runs
from tests.support.gated import allow
from tests.support.runs import Plain


@pytest.mark.parametrize("in_memory", [None, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_whose_head_process_is_killed_saves_a_checkpoint(
    tiny_run: Callable[..., Plain], tmp_path: Path, in_memory: int | None
) -> None:
    """With a Ray of its own; a report to Ray would wait for ever, and so would a look at its nodes."""
    kept = {"every_steps": 4, "asynchronous": False, "in_memory_every": in_memory}
    plain = tiny_run({"train.max_steps": 40, "checkpoint": kept}, rows=50)
    output = tmp_path / "out"
    config = runs.write_config(gated.gated(plain, output), tmp_path / "run.yaml")
    allow(output, 6)
    process = runs.start_cli("train", str(config), env={"RAY_ADDRESS": None, "RAY_AUTH_TOKEN": None})
    try:
        runs.wait_for_step(output / "run", 6, process)
        (head,) = [one for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "gcs_server"]
        head.kill()
        # A checkpoint is due before anybody knows.
        allow(output, 10)
        runs.wait_for_step(output / "run", 10, process)
        assert process.stdout is not None
        while "saving a checkpoint" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        allow(output, 40)
        _, err = process.communicate(timeout=runs.PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert "Ray's head process (the GCS) is gone" in err
    last = runs.values(output / "run", "step")[-1]
    assert last > 10
    assert (output / "run" / f"checkpoint-{last:06d}").is_dir()
