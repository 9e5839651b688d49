"""A served classifier: labels with their probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from finray.errors import ModelError
from finray.evaluation.labels import TextClassifier
from finray.models.loading import DTYPES
from finray.serving import protocol
from finray.serving.errors import ApiError, no_model, queue_full
from finray.serving.models import ServePlan, ServeSettings
from finray.serving.protocol import ClassifyRequest

# Maximum number of texts in a request.
MAX_TEXTS = 1024


class Classifier:
    """The model of a server that classifies.

    Args:
        settings: of the server.
        plan: what to serve.
        clock: seconds since 1970.

    Raises:
        FinrayError: the model cannot be loaded.
    """

    def __init__(self, settings: ServeSettings, plan: ServePlan, clock: Callable[[], float] = time.time) -> None:
        self.name, self._source, self._created = plan.name, settings.model, int(clock())
        dtype = DTYPES[settings.dtype] if settings.dtype else None
        self._model = TextClassifier(plan.artifact, dtype=dtype, max_length=settings.max_length)
        self.max_length = self._model.max_length
        self._max_queue, self._lock, self._taken = settings.max_queue, threading.Lock(), 0

    def counts(self) -> tuple[int, int]:
        """(running requests, waiting requests)."""
        return min(self._taken, 1), max(0, self._taken - 1)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue, for the event loop: it takes one before a thread is free for :meth:`answer`.
        Raises ApiError: too many requests wait."""
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
        Raises ApiError: there is no such model, a text is empty or too long, or its logits are not finite."""
        if request.model != self.name:
            raise no_model(request.model, [self.name], param="model")
        rows = self._rows(request)
        try:
            with self._lock:
                result = self._model.classify(rows)
        except ModelError as error:
            raise ApiError(422, f"{error.message}; {error.repair}", param="input") from None
        data = []
        for number, row in enumerate(result.predictions):
            label = list(row.label) if isinstance(row.label, tuple) else row.label
            shares = dict(zip(result.labels.names, row.probabilities, strict=False)) if row.probabilities else None
            data.append({"index": number, "label": label, "probabilities": shares})
        tokens = sum(len(ids) for ids, _ in rows)
        return {"object": "list", "model": self.name, "data": data, "usage": protocol.usage(tokens, 0)}

    def _rows(self, request: ClassifyRequest) -> list[tuple[Any, Any]]:
        inputs = [request.input] if isinstance(request.input, str) else request.input
        if not 1 <= len(inputs) <= MAX_TEXTS:
            raise ApiError(400, f"input takes 1 to {MAX_TEXTS} texts, but has {len(inputs)}", param="input")
        rows = []
        for number, text in enumerate(inputs):
            texts = (text,) if isinstance(text, str) else tuple(text)
            if len(texts) > 2 or not any(texts):
                raise ApiError(400, f"input[{number}] is neither a text nor a pair of texts", param="input")
            protocol.require_text(list(texts), "input")
            ids, types = self._model.row(texts)
            if self.max_length is not None and len(ids) > self.max_length:
                limit = f"the model reads at most {self.max_length:,}; shorten it"
                message = f"input[{number}] has {len(ids):,} tokens, but {limit}"
                raise ApiError(400, message, param="input", code="context_length_exceeded")
            rows.append((ids, types))
        return rows
