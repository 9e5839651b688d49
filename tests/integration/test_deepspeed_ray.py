"""DeepSpeed in the process group that Ray made: `finray train`, then what is left of it is an ordinary adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from finray import export_model, train
from tests.support import runs, tiny


def test_stage_3_under_ray(tmp_path: Path, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = tiny.write_chat_rows(tmp_path, 20)
    plain = runs.settings(tiny_model_dir, rows, tmp_path / "ray", train={"max_steps": 4, "global_batch_size": 3})
    runs.run_alone(plain, tmp_path / "alone")
    parallel = {"strategy": "deepspeed", "zero_stage": 3}
    result = train(runs.config_of({**plain, "parallel": parallel, "cluster": {"num_workers": 2}}))
    for key in ("loss", "grad_norm"):
        assert runs.values(result.run_dir, key) == pytest.approx(runs.values(tmp_path / "alone", key), rel=1e-4)
    # DeepSpeed's own files are there, and do not go into what is handed on.
    assert (result.run_dir / "checkpoint-000004" / "deepspeed" / "zero_to_fp32.py").is_file()
    assert not (result.final / "deepspeed").exists()
    export_model(result.run_dir, tmp_path / "exported", merge=True, dtype="fp32")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").num_parameters() > 0
