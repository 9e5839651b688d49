"""The configs of examples/jobs train on tiny stand-ins: a tiny model, some rows with the columns of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import load_config
from tests.support import runs, tiny

JOBS = Path(__file__).parents[2] / "examples" / "jobs"
ROWS: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": f"say {at}", "input": "", "output": f"it is {at}"} for at in range(40)],
    "dolphin": [{"instruction": f"say {at}", "input": "one two", "output": f"it is {at}"} for at in range(40)],
    "rust": [{"content": f"fn one_{at}() {{ two three {at} }}"} for at in range(40)],
    "imdb": [{"text": f"one two three four {at}", "label": at % 2} for at in range(40)],
    "sst2": [
        {"sentence": f"one two {'three' if at % 2 else 'four'} {at}", "label": "positive" if at % 2 else "negative"}
        for at in range(40)
    ],
}
# On a CPU, with one worker, in few and small steps: nothing of what the examples are about.
SMALL: dict[str, Any] = {
    "data.subset": None,
    "data.train_split": "train",
    "data.max_length": 64,
    "train.max_steps": 2,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "train.precision": "fp32",
    "train.optimizer": "adamw",
    "parallel.strategy": "ddp",
    "parallel.deepspeed_config": None,
    "parallel.zero_stage": None,
    "cluster.use_gpu": False,
    "evaluation.on_start": False,
    "tracking.log_every": 1,
    "model.quantization": "none",
}


@pytest.mark.parametrize(
    ("name", "rows", "changes"),
    [
        ("cluster_lora", "alpaca", {}),
        ("peft_fsdp", "dolphin", {"data.eval_ratio": 0.1, "data.test_ratio": 0.1, "evaluation.every_steps": 1}),
        ("rust_tutorial", "rust", {"data.format": "text", "data.field_mapping": {"text": "content"}}),
        ("bert_sst2", "sst2", {"data.eval_split": None, "data.eval_ratio": 0.2}),
        ("bloomz_zero3", "imdb", {"data.format": "text", "data.train_on": "all"}),
    ],
)
def test_an_example_trains_on_a_stand_in(
    name: str, rows: str, changes: dict[str, Any], tokenizer: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
    model = tiny_model_dir
    if name == "bert_sst2":
        tiny.save_encoder("bert", tmp_path / "model", tokenizer)
        model = tmp_path / "model"
    path = JOBS / f"{name}.yaml"
    real = load_config(path)
    own = {"model.name": str(model), "data.source": str(tmp_path / "rows.jsonl"), "run.output_dir": str(tmp_path)}
    overrides = [f"{field}={json.dumps(value)}" for field, value in {**SMALL, **own, **changes}.items()]
    config = load_config(path, overrides)
    runs.run_alone(config.model_dump(mode="json", exclude_unset=True), tmp_path / "run")
    assert runs.values(tmp_path / "run", "step") == [1, 2]
    # What the stand-in has of the real one.
    for section in ("adapter", "classification"):
        assert getattr(config, section) == getattr(real, section)
    assert config.data.field_mapping == real.data.field_mapping
    assert config.data.input_template == real.data.input_template


def test_every_example_is_trained() -> None:
    assert len(list(JOBS.glob("*.yaml"))) == 5
