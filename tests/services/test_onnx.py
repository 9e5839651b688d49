"""`finray export --onnx`: classifiers as ONNX Runtime runs them, beside Transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from finray.errors import ModelError
from finray.publishing.onnx import export_onnx
from tests.support import runs, tiny
from tests.support.labelled import LABELS, bert_tokenizer, load_classifier, save_classifier

onnxruntime = pytest.importorskip("onnxruntime", reason="make test-services has an environment with ONNX Runtime")

pytestmark = pytest.mark.nightly

TEXTS = [" ".join(tiny.WORDS[:count]) for count in (1, 4, 9, 17)]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_tuned_classifier_answers_as_transformers_does(family: str, tokenizer: Any, tmp_path: Path) -> None:
    adapter = save_classifier(family, tmp_path, bert_tokenizer() if family == "bert" else tokenizer)
    code, out, err = runs.finray("export", adapter, "--output", tmp_path / "made", "--onnx")
    assert code == 0, err
    assert f"wrote {tmp_path / 'made' / 'model.onnx'}" in out
    assert not list((tmp_path / "made").glob("*.safetensors"))
    assert not list(tmp_path.glob(".tmp-*"))
    reader = AutoTokenizer.from_pretrained(tmp_path / "made")
    reader.pad_token = reader.pad_token or reader.eos_token
    tuned = load_classifier(adapter)
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
    adapter, export = save_classifier("llama", tmp_path, tokenizer), torch.onnx.export

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
