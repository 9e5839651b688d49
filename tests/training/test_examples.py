"""The configs of examples/jobs have the numbers of the five systems. tests/journeys/test_seeds_jobs.py runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.config.load import load_config

JOBS = Path(__file__).parents[2] / "examples" / "jobs"

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
        # 8 of each worker, accumulated: the attention of this model gets each row alone.
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
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


def test_every_example_has_a_system() -> None:
    assert sorted(path.stem for path in JOBS.glob("*.yaml")) == sorted(NUMBERS)
