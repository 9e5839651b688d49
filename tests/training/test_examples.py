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


# What the documents of the five systems say.
NUMBERS: dict[str, dict[str, Any]] = {
    "cluster_lora": {"adapter.method": "lora", "run.output_dir": "/shared/runs", "data.source": "yahma/alpaca-cleaned"},
    "peft_fsdp": {
        "model.name": "Qwen/Qwen3-8B",
        "adapter.rank": 32,
        "adapter.alpha": 32,
        "adapter.dropout": 0.1,
        "train.max_steps": 10_000,
        "train.micro_batch_size": 2,
        # 2 rows, accumulated 4 times, on 8 GPUs.
        "train.global_batch_size": 64,
        "data.packing": False,
        "train.learning_rate": 5e-5,
        "train.min_learning_rate": 1e-6,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.03,
        "train.weight_decay": 0.01,
        "train.max_grad_norm": 1.0,
        "data.max_length": 2048,
        "data.eval_ratio": 0.05,
        "data.test_ratio": 0.05,
        "tracking.log_every": 10,
        "checkpoint.every_steps": 100,
        "evaluation.every_steps": 100,
        "checkpoint.keep_last": 2,
        "evaluation.early_stopping.patience": 3,
        "evaluation.early_stopping.min_gain": 0.001,
        "run.seed": 16257,
        "parallel.strategy": "fsdp",
    },
    "rust_tutorial": {
        "data.source": "bigcode/the-stack-smol:data/rust",
        "data.train_split": "train[:1%]",
        "data.format": "text",
        "train.micro_batch_size": 8,
        "train.learning_rate": 5e-5,
        "train.epochs": 3,
        "cluster.num_workers": 2,
        "adapter.method": "none",
    },
    "bert_sst2": {
        "model.name": "bert-base-uncased",
        "model.quantization": "auto",
        "data.source": "nyu-mll/glue",
        "data.subset": "sst2",
        "data.max_length": 128,
        "adapter.rank": 8,
        "adapter.alpha": 16,
        "adapter.dropout": 0.05,
        "adapter.target_modules": ["query", "value"],
        "train.epochs": 1,
        "train.learning_rate": 2e-4,
        "train.micro_batch_size": 64,
        "train.global_batch_size": 256,
        "train.gradient_checkpointing": "full",
        "cluster.num_workers": 4,
        "cluster.cpus_per_worker": 4,
        "run.name": "run-1",
        "export.push_to_hub": None,
    },
    "bloomz_zero3": {
        "model.name": "bigscience/bloomz-1b1",
        "data.source": "stanfordnlp/imdb",
        "data.max_length": 512,
        "data.eval_ratio": 0.1,
        "data.train_on": "all",
        "train.epochs": 1,
        "train.learning_rate": 2e-5,
        "train.micro_batch_size": 1,
        # 1 row, accumulated 8 times, on 2 GPUs.
        "train.global_batch_size": 16,
        "train.precision": "fp16",
        "train.optimizer": "paged_adamw_8bit",
        "train.gradient_checkpointing": "full",
        "cluster.num_workers": 2,
        "cluster.env.NCCL_P2P_DISABLE": "1",
        "cluster.env.PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:256",
        "parallel.zero_stage": 3,
    },
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_example_has_the_numbers_of_its_system(name: str) -> None:
    found = load_config(JOBS / f"{name}.yaml").model_dump()

    def value(path: str) -> Any:
        at: Any = found
        for part in path.split("."):
            at = at[part]
        return at

    assert {path: value(path) for path in NUMBERS[name]} == NUMBERS[name]


def test_every_example_is_trained() -> None:
    assert sorted(path.stem for path in JOBS.glob("*.yaml")) == sorted(NUMBERS)
