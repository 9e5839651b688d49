"""The evaluation before the first step; `test_against_plain.py` compares its loss with that of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finray.config.schema import EvaluationConfig
from tests.support import runs
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    evaluation = {"every_steps": 2, "early_stopping": {"patience": 2, "min_gain": 0.5}}
    return tiny_run({"adapter.dropout": 0.2, "data.eval_ratio": 0.2, "evaluation": evaluation}, model=dropout_model)


def test_it_is_on_and_changes_nothing_else(plain: Plain, tmp_path: Path) -> None:
    assert EvaluationConfig().on_start
    on = changed(plain, {"evaluation.on_start": True})
    runs.run_alone(plain, tmp_path / "without")
    runs.run_alone(on, tmp_path / "with")
    assert [record["step"] for record in runs.records(tmp_path / "with", "eval")] == [0, 2, 4, 6]
    assert runs.trace(tmp_path / "with") == runs.trace(tmp_path / "without")
    # With the loss of the base counted in, there would have been no gain at step 2, and the run had ended earlier.
    assert runs.values(tmp_path / "with", "step") == [1, 2, 3, 4, 5, 6]
    for name in ("checkpoint-000006/adapter_model.safetensors", "checkpoint-000006/adapter_config.json"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
