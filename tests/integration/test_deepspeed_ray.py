"""DeepSpeed in the process group that Ray made: `finray train`, then what is left of it is an ordinary adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finray import export, train
from tests.support import runs
from tests.support.runs import Plain, changed


def test_stage_3_under_ray_trains_and_exports(ray_cluster: str, tiny_run: Callable[..., Plain], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = tiny_run({"train.max_steps": 4, "train.global_batch_size": 3}, rows=20)
    runs.run_alone(plain, tmp_path / "alone")
    parallel = {"parallel.strategy": "deepspeed", "parallel.zero_stage": 3, "cluster.num_workers": 2}
    result = train(runs.config_of(changed(plain, parallel)))
    runs.assert_same_curve(result.run_dir, tmp_path / "alone")
    # DeepSpeed's own files are there, and do not go into what is handed on.
    assert (result.run_dir / "checkpoint-000004" / "deepspeed" / "zero_to_fp32.py").is_file()
    assert not (result.final / "deepspeed").exists()
    export(result.run_dir, tmp_path / "exported", merge=True, dtype="fp32")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").num_parameters() > 0
