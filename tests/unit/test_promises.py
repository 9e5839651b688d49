"""Sentences of the guide that were not so once: settings that reach the workers, repairs, the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import RunDir
from finray.config.load import build_config, read_preset
from finray.config.schema import Config
from finray.errors import ConfigError, ModelError
from finray.planning.checks import check_targets
from finray.planning.placement import worker_environment
from finray.records import RunSummary
from finray.results import PlainConsole
from finray.runtime.driver import TrainResult


def test_the_allocator_setting_of_a_preset_reaches_its_workers() -> None:
    config = build_config(read_preset("bloomz-zero3"), source="preset")
    for environ in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        env = worker_environment(config.cluster, threads=1, environ=environ)
        found = {value for name, value in env.items() if name.endswith("ALLOC_CONF")}
        assert found == {config.cluster.env["PYTORCH_ALLOC_CONF"]}


def test_patterns_of_modules_separated_by_commas_are_told_how_lists_are_written() -> None:
    plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}}
    config: Config = build_config({**plain, "adapter": {"target_modules": r"q_proj,.*\.v_proj"}}, source="x")
    with pytest.raises(ModelError) as caught:
        check_targets(config, ["model.layers.0.q_proj", "model.layers.0.v_proj"])
    assert r"[q_proj, .*\.v_proj]" in str(caught.value.repair)


def test_a_name_that_is_no_directory_gets_one_that_is() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"name": "m"}, "data": {"source": "d"}, "run": {"name": "run #1"}}, source="x")
    assert "(such as `run-1`)" in caught.value.problems[0]


@pytest.mark.parametrize(("step", "said"), [(1, "at the first step"), (21, "at step 21, the first of this start")])
def test_the_summary_says_of_which_step_its_first_loss_is(
    step: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = dict.fromkeys(
        ("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint", "total", "data_wait"), 0.0
    )
    summary = RunSummary(30, 30, 1, 1, 1.0, 1.0, 2.5, 1.5, "eval_loss", None, phases, (1,), first_step=step)
    assert RunSummary.from_json(summary.json()) == summary
    old = {name: value for name, value in summary.json().items() if name != "first_step"}
    assert RunSummary.from_json(old).first_step == 1
    RunDir(tmp_path).keep_config(build_config({"model": {"name": "m"}, "data": {"source": "d"}}, source="x"))
    TrainResult(tmp_path, Path("f"), 30, summary).print(PlainConsole(width=200))
    assert f"2.5000 {said}, 1.5000 at the last" in capsys.readouterr().out
