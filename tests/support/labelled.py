"""Preparing labelled text for an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertTokenizerFast

from tests.support.preparing import Preparing
from tests.support.tiny import WORDS

CLASSIFIES = {"task": "sequence_classification"}


def bert_tokenizer() -> Any:
    """A tokenizer of BERT's kind: [CLS] a [SEP] b [SEP], with token types."""
    words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(WORDS)])}
    core = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=core)


@pytest.fixture
def classifying(tmp_path: Path) -> Preparing:
    """Prepares for an encoder."""
    folder = tmp_path / "encoder"
    tokenizer = bert_tokenizer()
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return Preparing(folder, tokenizer, tmp_path / "prepared")
