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
from finray.models.export import export
from finray.models.loading import build_model
from finray.models.saved_layout import SavedLayout
from finray.models.sharded import materialize
from finray.planning.blueprint import build_blueprint

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


def built(model: ModelConfig, *, seed: int = 1, on_meta: bool = False, **fields: Any) -> Any:
    adapter = AdapterConfig(**{"rank": 4, **fields})
    options: dict[str, Any] = {"precision": "fp32", "attention_name": None, "bits": None, "device": CPU}
    made = build_model(model, adapter, seed=seed, on_meta=on_meta, **options)
    if on_meta:
        materialize(made, model, adapter, device=CPU, seed=seed)
    return made.eval()


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def save(model: Any, folder: Path, config: ModelConfig, tokenizer: Any) -> None:
    """As a run saves: weights and settings by the layout, and the notes beside them."""
    layout = SavedLayout(model)
    folder.mkdir()
    whole = {name: tensor.detach().contiguous() for name, tensor in layout.tensors().items()}
    save_file(layout.in_file(whole), folder / f"{layout.stem}.safetensors", metadata={"format": "pt"})
    layout.save_settings(folder)
    tokenizer.save_pretrained(str(folder))
    notes = {"base_model": config.name, "rows": "labelled", "task": TOY.name, "auto_class": TOY.auto_class}
    (folder / NOTES).write_text(json.dumps(notes), encoding="utf-8")


@pytest.fixture
def learned(model: ModelConfig) -> Any:
    """A classifier that is not as it began."""
    made = built(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained(made).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return made


def test_a_classifier_trains_lora_and_its_head(model: ModelConfig) -> None:
    made = built(model)
    assert type(made.get_base_model()).__name__ == "LlamaForSequenceClassification"
    names = trained(made)
    assert [name for name in names if ".lora_" not in name] == ["base_model.model.score.modules_to_save.default.weight"]
    assert not any("score" in name for name in names if ".lora_" in name)
    assert made(input_ids=TOKENS).logits.shape == (1, 2)
    blueprint = build_blueprint(model, AdapterConfig(rank=4))
    assert blueprint.trainable == sum(one.numel() for one in names.values())


@pytest.mark.parametrize("method", ["lora", "none"])
def test_a_head_that_no_file_has_follows_from_the_seed(model: ModelConfig, method: str) -> None:
    torch.manual_seed(8)
    first, again, sharded = (trained(built(model, on_meta=meta, method=method)) for meta in (False, False, True))
    assert first.keys() == sharded.keys()
    assert all(torch.equal(one, again[name]) and torch.equal(one, sharded[name]) for name, one in first.items())
    head = next(name for name in first if "score" in name)
    assert not torch.equal(first[head], trained(built(model, seed=2, method=method))[head])


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
def test_an_exported_classifier_is_read_by_plain_transformers(
    model: ModelConfig, learned: Any, merge: bool, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    save(learned, tmp_path / "run", model, tokenizer)
    found = read_artifact(tmp_path / "run")
    expected = learned(input_ids=TOKENS).logits
    torch.testing.assert_close(load_artifact(found, dtype=torch.float32)(input_ids=TOKENS).logits, expected)
    exported = export(found, tmp_path / "out", merge=merge, dtype="fp32")
    assert exported.merged is merge
    plain = AutoModelForSequenceClassification if merge else AutoPeftModelForSequenceClassification
    loaded = plain.from_pretrained(str(tmp_path / "out")).eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    again = read_artifact(tmp_path / "out")
    assert tasks.SPECS[again.model.task].auto_class == TOY.auto_class
    torch.testing.assert_close(
        load_artifact(again, dtype=torch.float32)(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("change", [lambda head: None, lambda head: head[:1]], ids=["missing", "another shape"])
def test_a_trained_classifier_without_its_head_gives_no_answers_of_a_random_one(
    change: Callable[[torch.Tensor], torch.Tensor | None], model: ModelConfig, tokenizer: Any, tmp_path: Path
) -> None:
    save(built(model, method="none"), tmp_path / "run", model, tokenizer)
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


def test_quantized_layers_are_those_of_the_body(model: ModelConfig) -> None:
    from finray.models.quantized import QuantizedLinear

    options: dict[str, Any] = {"precision": "bf16", "attention_name": None, "seed": 1, "device": CPU}
    made = build_model(model, AdapterConfig(rank=4), bits=4, **options)
    kinds = {name: isinstance(one, QuantizedLinear) for name, one in made.named_modules()}
    assert kinds["base_model.model.model.layers.0.self_attn.q_proj.base_layer"]
    assert not any(packed for name, packed in kinds.items() if "score" in name)


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
