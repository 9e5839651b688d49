"""A served classifier: labels with their probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from finray.config.schema import ModelConfig
from finray.evaluation.artifacts import inference_device, inference_dtype
from finray.evaluation.classify import classify
from finray.models.artifacts import load_artifact
from finray.models.loading import DTYPES
from finray.models.packing_cache import packing_of
from finray.models.saved_layout import without_adapter
from finray.pretrained.tokenizers import load_tokenizer
from finray.serving import protocol
from finray.serving.errors import ApiError, no_model, queue_full
from finray.serving.models import Found, Settings
from finray.serving.protocol import ClassifyRequest

# Maximum number of texts in a request.
MAX_TEXTS = 1024


class Classifier:
    """The model of a server that classifies.

    Args:
        settings: of the server.
        found: what to serve.
        clock: seconds since 1970.

    Raises:
        FinrayError: the model cannot be loaded.
    """

    def __init__(self, settings: Settings, found: Found, clock: Callable[[], float] = time.time) -> None:
        device = inference_device()
        self.name, self._source, self._created = found.name, settings.model, int(clock())
        self._labels = found.artifact.labels
        packing = packing_of(found.artifact.model)
        self._packs = packing.safe
        dtype = DTYPES[settings.dtype] if settings.dtype else inference_dtype(None, device)
        self._model = load_artifact(found.artifact, dtype=dtype).to(device)
        self._tokenizer = load_tokenizer(ModelConfig(name=str(found.artifact.folder)))
        inner = without_adapter(self._model)
        named = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        # RoBERTa's positions begin after the padding index: its table holds fewer than it says.
        limits = (settings.max_length, named, packing.positions)
        self.max_length: int | None = min((one for one in limits if one), default=None)
        self._max_queue, self._lock, self._taken = settings.max_queue, threading.Lock(), 0

    def counts(self) -> tuple[int, int]:
        """(running requests, waiting requests)."""
        return min(self._taken, 1), max(0, self._taken - 1)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue, for the event loop: it takes one before a thread is free for :meth:`answer`.

        Raises:
            ApiError: too many requests wait.
        """
        if self._taken > self._max_queue:
            raise queue_full()
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    def document(self) -> dict[str, Any]:
        """As listed by `/v1/models`."""
        return protocol.model_document(self.name, self._source, self._created, max_length=self.max_length)

    def answer(self, request: ClassifyRequest) -> dict[str, Any]:
        """The response; requests run one at a time.

        Raises:
            ApiError: there is no such model, or a text is empty or too long.
        """
        if request.model != self.name:
            raise no_model(request.model, [self.name], param="model")
        rows = self._rows(request)
        with self._lock:
            result = classify(self._model, rows, packs=self._packs, labels=self._labels)
        data = []
        for number, one in enumerate(result.predictions):
            label = list(one.label) if isinstance(one.label, tuple) else one.label
            shares = dict(zip(result.labels.names, one.probabilities, strict=False)) if one.probabilities else None
            data.append({"index": number, "label": label, "probabilities": shares})
        tokens = sum(len(ids) for ids, _ in rows)
        return {"object": "list", "model": self.name, "data": data, "usage": protocol.usage(tokens, 0)}

    def _rows(self, request: ClassifyRequest) -> list[tuple[Any, Any]]:
        inputs = [request.input] if isinstance(request.input, str) else request.input
        if not 1 <= len(inputs) <= MAX_TEXTS:
            raise ApiError(400, f"input takes 1 to {MAX_TEXTS} texts, but has {len(inputs)}", param="input")
        rows = []
        for number, one in enumerate(inputs):
            texts = (one,) if isinstance(one, str) else tuple(one)
            if len(texts) > 2 or not any(texts):
                raise ApiError(400, f"input[{number}] is neither a text nor a pair of texts", param="input")
            protocol.require_text(list(texts), "input")
            encoded = self._tokenizer(*texts)
            ids = encoded["input_ids"]
            if self.max_length is not None and len(ids) > self.max_length:
                limit = f"the model reads at most {self.max_length:,}; shorten it"
                message = f"input[{number}] has {len(ids):,} tokens, but {limit}"
                raise ApiError(400, message, param="input", code="context_length_exceeded")
            types = encoded.get("token_type_ids") or [0] * len(ids)
            rows.append((np.asarray(ids), np.asarray(types)))
        return rows
