"""Preparing labelled text for an encoder, and a tiny tuned classifier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, BertTokenizerFast

from tests.support import tiny
from tests.support.preparing import Preparing
from tests.support.tiny import WORDS

CLASSIFIES = {"task": "sequence_classification"}
LABELS = {0: "animal", 1: "plant", 2: "stone"}


def bert_tokenizer(more: Sequence[str] = (), *, most: int | None = None) -> Any:
    """A tokenizer of BERT's kind: [CLS] a [SEP] b [SEP], with token types, ``more`` pieces and ``most`` tokens."""
    words = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *more])
    words = {word: at for at, word in enumerate(words)}
    core = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=core, **({} if most is None else {"model_max_length": most}))


@pytest.fixture
def classifying(tmp_path: Path) -> Preparing:
    """Prepares for an encoder."""
    folder = tmp_path / "encoder"
    tokenizer = bert_tokenizer()
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return Preparing(folder, tokenizer, tmp_path / "prepared")


def save_classifier(family: str, folder: Path, tokenizer: Any) -> Path:
    """A tiny classifier in `folder/base`, and an adapter for it with random values, whose directory is returned."""
    model = tiny.build_classifier(family, classes=3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.config.id2label, model.config.label2id = LABELS, {name: at for at, name in LABELS.items()}
    model.config.problem_type = "single_label_classification"
    # Else all texts have one label.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("classifier.weight", "score.weight"):
                parameter.mul_(30.0)
            elif name.endswith(("classifier.bias", "pooler.dense.bias")):
                parameter.zero_()
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


def load_classifier(adapter: Path) -> Any:
    """What `save_classifier` wrote, by Transformers and PEFT alone."""
    base = AutoModelForSequenceClassification.from_pretrained(adapter.parent / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter)).eval()
