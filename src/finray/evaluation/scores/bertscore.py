"""BERTScore (Zhang et al. 2020): similarity of two texts by an encoder's token embeddings, as in bert-score.

Each token of a text is matched with the token of the other text whose hidden state has the largest cosine similarity.
The mean over the answer's tokens is the precision, that over the reference's the recall; the score is their F1. Special
tokens at the begin and end can be matched with, but do not count. No inverse document frequencies, no baseline
rescaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from finray.config.evaluation import ScoringConfig
from finray.config.schema import ModelConfig
from finray.errors import ConfigError
from finray.evaluation.artifacts import inference_device
from finray.evaluation.scores.base import Answered, Bounds, FloatArray, SummedScore
from finray.pretrained.tokenizers import check_exists, load_tokenizer, loading_options, not_loaded

# The layer that bert-score 0.3.13 compares (`model2layers`), for the most common encoders.
_LAYERS = {
    "bert-base-uncased": 9,
    "bert-large-uncased": 18,
    "bert-base-multilingual-cased": 9,
    "distilbert-base-uncased": 5,
    "roberta-base": 10,
    "roberta-large": 17,
    "distilroberta-base": 5,
    "xlm-roberta-base": 9,
    "xlm-roberta-large": 17,
    "microsoft/deberta-base-mnli": 9,
    "microsoft/deberta-xlarge-mnli": 40,
}
# Tokens per encoder batch, including padding.
_TOKENS = 8192
# What the encoder found for the latest pairs: precision, recall and F1 are three scores of one computation.
_latest: dict[Any, FloatArray] = {}


class BERTScore(SummedScore):
    """Mean F1 of BERTScore with the encoder of ``evaluation.scoring.encoder``."""

    # Cosines may be negative.
    bounds: Bounds | None = (-1.0, 1.0)
    # Of precision, recall and F1.
    column: ClassVar[int] = 2

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        super().__init__(settings)
        if (name := self.settings.encoder) is None:
            raise ConfigError(
                "`bertscore` needs an encoder model, and none is set",
                where="evaluation.scoring.encoder",
                repair="evaluation.scoring.encoder=roberta-large, or the directory of another encoder",
            )
        check_exists(name)

    def statistics(self, rows: Sequence[Answered]) -> FloatArray:
        """The score of each row (N, 1)."""
        pairs = tuple((row.answer, row.reference) for row in rows)
        key = self.settings.encoder, self.settings.encoder_layer, pairs
        if key not in _latest:
            _latest.clear()
            _latest[key] = self.precision_recall_f1(pairs)
        return _latest[key][:, [self.column]]

    @torch.no_grad()
    def precision_recall_f1(self, pairs: Sequence[tuple[str, str]]) -> FloatArray:
        """For each pair of answer and reference (N, 3); 0 if one of them is empty."""
        encoder, tokenizer, layer = self._loaded
        special = {tokenizer.cls_token_id, tokenizer.sep_token_id}
        pad, device = int(tokenizer.pad_token_id or 0), encoder.device
        ids = {text: self._ids(tokenizer, text) for pair in pairs for text in pair}
        scores = np.zeros((len(pairs), 3))
        # Pairs of similar length are encoded together, to waste little on padding.
        waiting = sorted(range(len(pairs)), key=lambda pair: -max(len(ids[text]) for text in pairs[pair]))
        while waiting:
            longest = max(len(ids[text]) for text in pairs[waiting[0]])
            size = max(1, _TOKENS // (2 * longest))
            batch, waiting = waiting[:size], waiting[size:]
            texts = [pairs[pair][side] for side in (0, 1) for pair in batch]
            tokens_BT = torch.full((len(texts), longest), pad, dtype=torch.int64)
            for row, text in enumerate(texts):
                tokens_BT[row, : len(ids[text])] = torch.tensor(ids[text])
            mask_BT = torch.arange(longest)[None] < torch.tensor([len(ids[text]) for text in texts])[:, None]
            states = encoder(
                input_ids=tokens_BT.to(device), attention_mask=mask_BT.long().to(device), output_hidden_states=True
            ).hidden_states[layer]
            unit_BTH = torch.nn.functional.normalize(states.float(), dim=-1)
            counts_BT = mask_BT & ~torch.isin(tokens_BT, torch.tensor([at for at in special if at is not None]))
            answer, reference = unit_BTH[: len(batch)], unit_BTH[len(batch) :]
            both = mask_BT[: len(batch), :, None] & mask_BT[len(batch) :, None, :]
            # As in bert-score, padding has similarity 0, also if all others are negative.
            alike = (answer @ reference.transpose(1, 2)).cpu() * both
            counted = counts_BT.double()
            precision = (alike.amax(2) * counted[: len(batch)]).sum(1) / counted[: len(batch)].sum(1)
            recall = (alike.amax(1) * counted[len(batch) :]).sum(1) / counted[len(batch) :].sum(1)
            f1 = 2 * precision * recall / (precision + recall)
            empty = (counted[: len(batch)].sum(1) == 0) | (counted[len(batch) :].sum(1) == 0)
            scores[batch] = torch.stack((precision, recall, f1), 1).masked_fill(empty[:, None], 0.0).nan_to_num(0.0)
        return scores

    @staticmethod
    def _ids(tokenizer: Any, text: str) -> list[int]:
        """Token ids with special tokens; byte-level tokenizers get a leading space, as inside a text."""
        text = text.strip()
        prefix = " " if text and type(tokenizer).__name__.startswith(("Roberta", "GPT2")) else ""
        limit = min(int(tokenizer.model_max_length), 2**16)
        return list(tokenizer(prefix + text, truncation=True, max_length=limit)["input_ids"])

    @cached_property
    def _loaded(self) -> tuple[Any, Any, int]:
        """The encoder, its tokenizer, and the layer to compare."""
        from transformers import AutoModel

        model = ModelConfig(name=str(self.settings.encoder))
        tokenizer, options = load_tokenizer(model), loading_options(model)
        try:
            encoder = AutoModel.from_pretrained(**options, dtype=torch.float32, use_safetensors=True)
        except Exception as error:
            raise not_loaded("encoder", model, error) from None
        layers = int(encoder.config.num_hidden_layers)
        layer = self.settings.encoder_layer or _LAYERS.get(model.name.removeprefix("google-bert/"), layers)
        if layer > layers:
            raise ConfigError(
                f"the encoder has {layers} layers",
                where="evaluation.scoring.encoder_layer",
                repair="choose one of its layers",
            )
        return encoder.eval().to(inference_device()), tokenizer, layer


class BERTScorePrecision(BERTScore):
    """Mean precision of BERTScore."""

    column = 0


class BERTScoreRecall(BERTScore):
    """Mean recall of BERTScore."""

    column = 1
