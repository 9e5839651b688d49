"""`finray export --onnx`: classifiers as ONNX Runtime runs them, beside Transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finray.errors import ModelError
from finray.publishing.onnx import export_onnx
from tests.support import runs, tiny
from tests.support.labelled import bert_tokenizer

onnxruntime = pytest.importorskip("onnxruntime", reason="make test-services has an environment with ONNX Runtime")

LABELS = {0: "animal", 1: "plant", 2: "stone"}
TEXTS = [" ".join(tiny.WORDS[:count]) for count in (1, 4, 9, 17)]


def save(family: str, folder: Path, tokenizer: Any) -> Path:
    """A tiny classifier and an adapter for it, whose directory is returned."""
    model = tiny.build_classifier(family, classes=3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.config.id2label, model.config.label2id = LABELS, {name: at for at, name in LABELS.items()}
    model.config.problem_type = "single_label_classification"
    model.save_pretrained(str(folder / "base"))
    tokenizer.save_pretrained(str(folder / "base"))
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    get_peft_model(model, lora).save_pretrained(str(folder / "adapter"))
    tokenizer.save_pretrained(str(folder / "adapter"))
    notes = {"task": "sequence_classification", "auto_class": "AutoModelForSequenceClassification"}
    notes |= {"problem": "single_label", "labels": list(LABELS.values()), "base_model": str(folder / "base")}
    (folder / "adapter" / "finray.json").write_text(json.dumps(notes))
    return folder / "adapter"


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_tuned_classifier_answers_as_transformers_does(family: str, tokenizer: Any, tmp_path: Path) -> None:
    adapter = save(family, tmp_path, bert_tokenizer() if family == "bert" else tokenizer)
    code, out, err = runs.finray("export", adapter, "--output", tmp_path / "made", "--onnx")
    assert code == 0, err
    assert f"wrote {tmp_path / 'made' / 'model.onnx'}" in out
    assert not list((tmp_path / "made").glob("*.safetensors"))
    assert not list(tmp_path.glob(".tmp-*"))
    reader = AutoTokenizer.from_pretrained(tmp_path / "made")
    reader.pad_token = reader.pad_token or reader.eos_token
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
    session = onnxruntime.InferenceSession(str(tmp_path / "made" / "model.onnx"))
    names = [one.name for one in session.get_inputs()]
    assert names == ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    pairs = [(text, "what follows") for text in TEXTS]
    for rows in (TEXTS, TEXTS[:1], pairs if family == "bert" else TEXTS[2:]):
        batch = reader(rows, padding=True, return_tensors="pt", return_token_type_ids=True)
        fed = {name: batch[name] for name in names}
        with torch.no_grad():
            right = tuned(**fed).logits.numpy()
        (found,) = session.run(None, {name: one.numpy() for name, one in fed.items()})
        assert np.abs(found - right).max() < 1e-4 * np.abs(right).max()
    assert json.loads((tmp_path / "made" / "config.json").read_text())["id2label"] == {
        str(at): name for at, name in LABELS.items()
    }


def test_a_file_of_another_model_would_be_seen(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the exporter writes a model with another head."""
    adapter, export = save("llama", tmp_path, tokenizer), torch.onnx.export

    def other(model: Any, **options: Any) -> None:
        with torch.no_grad():
            model.score.weight.neg_()
        export(model, **options)
        with torch.no_grad():
            model.score.weight.neg_()

    monkeypatch.setattr("torch.onnx.export", other)
    with pytest.raises(ModelError, match="differ from the model's"):
        export_onnx(adapter, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".tmp-*"))
