"""A task is one file and one line in a table: models are built, adapted, saved and exported by the class it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from finray.config import tasks, trust
from finray.config.adapter_files import NOTES
from finray.config.extensions import TABLES
from finray.config.resolved import LabelSet
from finray.config.schema import AdapterConfig, ModelConfig
from finray.config.tasks import TaskSpec
from finray.errors import ModelError
from finray.models.artifacts import load_artifact, read_artifact
from finray.models.classifier import labels_in
from finray.models.loading import build_model
from finray.planning.blueprint import build_blueprint
from tests.support.adapted import save_classifier

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 40)[None]
TOY = TaskSpec(
    "toy_classification",
    rows=frozenset({"labelled"}),
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    best=("accuracy", "max"),
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> ModelConfig:
    """A classifier on a causal model, whose files have no head for it."""
    monkeypatch.setitem(tasks.SPECS, TOY.name, TOY)
    monkeypatch.setitem(TABLES["finray.tasks"], TOY.name, "tests.unit.models.test_auto_class:TOY")
    return ModelConfig(name=str(tiny_model_dir), task=TOY.name)


def built(model: ModelConfig, **fields: Any) -> Any:
    options: dict[str, Any] = {"precision": "fp32", "attention_name": None, "bits": None, "seed": 1, "device": CPU}
    return build_model(model, AdapterConfig(**{"rank": 4, **fields}), **options).eval()


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def test_a_classifier_trains_lora_and_its_head(model: ModelConfig) -> None:
    made = built(model)
    assert type(made.get_base_model()).__name__ == "LlamaForSequenceClassification"
    names = trained(made)
    assert [name for name in names if ".lora_" not in name] == ["base_model.model.score.modules_to_save.default.weight"]
    assert not any("score" in name for name in names if ".lora_" in name)
    assert made(input_ids=TOKENS).logits.shape == (1, 2)
    blueprint = build_blueprint(model, AdapterConfig(rank=4))
    assert blueprint.trainable == sum(one.numel() for one in names.values())


@pytest.mark.parametrize("change", [lambda head: None, lambda head: head[:1]], ids=["missing", "another shape"])
def test_a_trained_classifier_without_its_head_gives_no_answers_of_a_random_one(
    change: Callable[[torch.Tensor], torch.Tensor | None], model: ModelConfig, tokenizer: Any, tmp_path: Path
) -> None:
    save_classifier(built(model, method="none"), tmp_path / "run", model, tokenizer)
    file = tmp_path / "run" / "model.safetensors"
    tensors = load_file(file)
    head = change(tensors.pop("score.weight"))
    save_file(tensors if head is None else tensors | {"score.weight": head}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_artifact(read_artifact(tmp_path / "run"), dtype=torch.float32)


def test_labels_without_a_name_for_an_id_are_one_message() -> None:
    config = LlamaConfig(id2label={5: "a", 1: "b"}, problem_type="single_label_classification")
    with pytest.raises(ModelError, match=r"the ids \[1, 5\], and not 0 to 1"):
        labels_in(config)
    config = LlamaConfig(id2label={1: "b", 0: "a"}, problem_type="single_label_classification")
    assert labels_in(config) == LabelSet("single_label", ("a", "b"))


def test_a_task_of_your_own_is_not_imported_where_finray_loads_the_same_class(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    notes = {"task": "nowhere:SmoothedLM", "auto_class": "AutoModelForCausalLM"}
    (tmp_path / NOTES).write_text(json.dumps(notes), encoding="utf-8")
    assert read_artifact(tmp_path).model.task == "causal_lm"
    (tmp_path / NOTES).write_text(json.dumps(notes | {"auto_class": "AutoModelForTokenClassification"}))
    with pytest.raises(ModelError, match="names code of its own, the task `nowhere:SmoothedLM`"):
        read_artifact(tmp_path)
    trust.accept(tmp_path / NOTES)
    assert read_artifact(tmp_path).model.task == "nowhere:SmoothedLM"
