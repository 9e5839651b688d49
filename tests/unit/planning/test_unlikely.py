"""Settings that can be had, and are hardly meant: a plan says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import build_config
from finray.planning.findings import Findings
from finray.planning.model import plan_model
from finray.planning.steps import unlikely
from tests.support import runs


def said(steps: int = 4, **sections: Any) -> list[str]:
    config = build_config(
        {"model": {"name": "m"}, "data": {"source": "d", **sections.pop("data", {})}} | sections, source="x"
    )
    return [where for _, where, _ in unlikely(config, steps)]


@pytest.mark.parametrize(
    ("where", "sections"),
    [
        ("train.learning_rate", {"train": {"learning_rate": 5}}),
        ("train.learning_rate", {"adapter": {"method": "none"}, "train": {"learning_rate": 2e-4}}),
        (
            "train.learning_rate",
            {"adapter": {"method": "none"}, "train": {"learning_rate": 2e-4, "optimizer": "paged_adamw_8bit"}},
        ),
        ("train.warmup_steps", {"train": {"warmup_steps": 100_000}}),
        ("evaluation.every_steps", {"evaluation": {"every_steps": 1000}, "data": {"eval_ratio": 0.1}}),
        ("train.profile", {"train": {"profile": {"steps": [3, 5]}}}),
        ("train.learning_rate", {"train": {"learning_rate": 1e-40}}),
        ("train.max_grad_norm", {"train": {"max_grad_norm": 1e-30}}),
        ("train.max_grad_norm", {"train": {"max_grad_norm": 1e-9, "optimizer": "muon"}}),
        ("train.adam_epsilon", {"train": {"adam_epsilon": 1.0}}),
        ("train.adam_beta1", {"train": {"adam_beta1": 0.9995}}),
        ("train.weight_decay", {"train": {"weight_decay": 1e4}}),
        ("train.warmup_ratio", {"train": {"warmup_ratio": 0.9}}),
        (
            "classification.label_smoothing",
            {"model": {"name": "m", "task": "sequence_classification"}, "classification": {"label_smoothing": 0.9}},
        ),
        ("adapter.dropout", {"adapter": {"dropout": 0.99}}),
        ("adapter.alpha", {"adapter": {"alpha": 1e-6}}),
        ("adapter.lora_plus_ratio", {"adapter": {"lora_plus_ratio": 1e6}}),
        ("evaluation.max_rows", {"evaluation": {"max_rows": 10}}),
        ("data.train_split", {"data": {"source": __file__, "train_split": "validation"}}),
        ("data.train_split", {"data": {"source": "rows-*.jsonl", "train_split": "validation"}}),
        ("data.train_split", {"data": {"source": "s3://bucket/rows.parquet", "train_split": "validation[:5]"}}),
        ("data.eval_split", {"data": {"eval_source": __file__, "eval_split": "validation"}}),
        (
            "data.mix.1.split",
            {"data": {"source": None, "mix": [{"source": "d"}, {"source": __file__, "split": "dev"}]}},
        ),
    ],
)
def test_what_is_hardly_meant_is_said(where: str, sections: dict[str, Any]) -> None:
    assert said(**sections) == [where]


def test_nothing_is_said_of_what_is_usual() -> None:
    usual = {
        "train": {"learning_rate": 1e-3, "warmup_steps": 4, "profile": {"steps": [3, 4]}},
        "evaluation": {"every_steps": 4, "max_rows": 10},
        "data": {"eval_ratio": 0.1, "source": __file__, "train_split": "train[:10%]"},
    }
    for elsewhere in ("s3://bucket/rows", "org/name", str(Path(__file__).parent)):
        assert said(data={"source": elsewhere, "train_split": "validation"}) == []
    assert said(**usual) == []
    for train in ({"learning_rate": 5e-5}, {"learning_rate": 1e-4}, {"optimizer": "muon"}, {"optimizer": "adafactor"}):
        assert said(adapter={"method": "none"}, train=train) == []


def test_the_repair_of_a_learning_rate_is_not_refused_where_the_run_is_continued() -> None:
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "adapter": {"method": "none"}}
    config = build_config(plain | {"train": {"learning_rate": 2e-4}}, source="x")
    assert [repair for _, _, repair in unlikely(config, 4)] == ["train.learning_rate=2e-5"]
    (_, _, again), *_ = unlikely(config, 4, continued=True)
    assert again == "train.learning_rate=2e-5 in a run of another run.name"


@pytest.mark.parametrize(
    ("base", "notes", "model", "expected"),
    [
        ("org/Llama-8B", {}, "org/Llama-8B", False),
        ("org/Llama-8B", {}, "/models/llama-8b", False),
        ("org/Llama-8B", {}, "org/Llama-8B-Instruct", True),
        # PEFT writes the place where the base was then, finray its name.
        ("/tmp/copy", {"base_model": "org/Llama-8B"}, "org/Llama-8B", False),
        (None, {}, "m", False),
    ],
)
def test_an_adapter_of_another_model_is_said(
    tmp_path: Path, base: str | None, notes: dict[str, str], model: str, expected: bool
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (tmp_path / "finray.json").write_text(json.dumps(notes))
    found = said(model={"name": model}, adapter={"start_from": str(tmp_path)})
    assert found == (["model.name"] if expected else [])


def test_a_rank_beyond_the_models_columns_is_said(tiny_run: Any) -> None:
    for rank, expected in ((64, []), (10_000, ["adapter.rank"])):
        found = Findings()
        plan_model(runs.config_of(tiny_run({"adapter.rank": rank})), found)
        assert [one.where for one in found.warnings] == expected
