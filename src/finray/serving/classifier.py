"""A served classifier: labels with their probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from finray.errors import DataError, ModelError
from finray.evaluation.labels import TextClassifier
from finray.models.loading import DTYPES
from finray.serving import protocol
from finray.serving.errors import ApiError, no_model, queue_full
from finray.serving.models import ServePlan, ServeSettings
from finray.serving.protocol import ClassifyRequest, ScoreRequest

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
        self.name, self._source, self._clock = plan.name, settings.model, clock
        self._created = int(clock())
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

    def answer(self, request: ClassifyRequest | ScoreRequest) -> dict[str, Any]:
        """The response; requests run one at a time.
        Raises ApiError: there is no such model, it gives no scores, a text is empty or too long, or its logits are not
        finite."""
        if request.model != self.name:
            raise no_model(request.model, [self.name], param="model")
        rows = self._rows(request)
        try:
            with self._lock:
                result = self._model.classify(rows)
        except ModelError as error:
            raise ApiError(422, f"{error.message}; {error.repair}", param="input") from None
        data = list[dict[str, Any]]()
        for number, row in enumerate(result.predictions):
            if isinstance(request, ScoreRequest):
                if not isinstance(row.label, float):
                    raise ApiError(400, "the model gives labels, not scores: use /v1/classify", param="model")
                data.append({"index": number, "object": "score", "score": row.label})
                continue
            label = list(row.label) if isinstance(row.label, tuple) else row.label
            shares = dict(zip(result.labels.names, row.probabilities, strict=False)) if row.probabilities else None
            # The last two as in vLLM.
            probs: list[Any] = list(row.probabilities) or [label]
            entry = {"index": number, "label": label, "probabilities": shares}
            data.append({**entry, "probs": probs, "num_classes": len(probs)})
        tokens = sum(len(ids) for ids, _ in rows)
        head = {"id": f"classify-{uuid4().hex}", "object": "list", "created": int(self._clock())}
        return {**head, "model": self.name, "data": data, "usage": protocol.usage(tokens, 0)}

    def _rows(self, request: ClassifyRequest | ScoreRequest) -> list[tuple[Any, Any]]:
        where, texts = request.texts()
        if not 1 <= len(texts) <= MAX_TEXTS:
            raise ApiError(400, f"{where} takes 1 to {MAX_TEXTS} texts, but has {len(texts)}", param=where)
        rows = []
        for number, each in enumerate(texts):
            if where != "messages" and (len(each) > 2 or not any(each)):
                raise ApiError(400, f"{where}[{number}] is neither a text nor a pair of texts", param=where)
            protocol.require_text(list(each), where)
            try:
                read = self._model.conversation if where == "messages" else self._model.row
                ids, types = read(each)
            except DataError as error:
                raise ApiError(400, error.message, param=where) from None
            if self.max_length is not None and len(ids) > self.max_length:
                limit = f"the model reads at most {self.max_length:,}; shorten it"
                message = f"{where}[{number}] has {len(ids):,} tokens, but {limit}"
                raise ApiError(400, message, param=where, code="context_length_exceeded")
            rows.append((ids, types))
        return rows
