"""The server without its host process: models, the thread of their batch, and the web application."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from finray.config import trust
from finray.config.environment import set_default
from finray.config.redact import redact_error
from finray.serving import protocol
from finray.serving.access import Access
from finray.serving.adding import Loader
from finray.serving.answering import Exchange
from finray.serving.classifier import Classifier
from finray.serving.errors import ApiError, caused_by_request, no_model, of_server, queue_full, readable
from finray.serving.models import Models, Served, ServeSettings, api_key, find
from finray.serving.protocol import (
    AdapterRequest,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    RemovalRequest,
    ScoreRequest,
)

logger = logging.getLogger(__name__)
_POLL_S = 0.05
# Seconds in which the body of a request must arrive.
_BODY_S = 60.0
# They answer without a key, for those who watch over the process.
_FREE = ("/health", "/ready")


class ApiServer:
    """Answers requests.

    Args:
        settings: of `finray serve`.
        notify: called with messages for the user, one line each.

    Raises:
        FinrayError: a model cannot be loaded.
    """

    def __init__(self, settings: ServeSettings, notify: Callable[[str], None]) -> None:
        set_default("TOKENIZERS_PARALLELISM", "false")
        trust.accept_all(settings.trusted)
        self._settings, self._requests, self._is_stopping = settings, 0, False
        key = api_key(settings.key_env) if settings.key_env is not None else None
        self._access = Access(key, host=settings.host, names=settings.allow_hosts)
        self._loader, self._preparing = Loader[Served](settings.load_s), 0
        plan = find(settings)
        self._classifier = Classifier(settings, plan) if plan.is_classifier else None
        self._models = None if plan.is_classifier else Models(settings, plan, notify)
        self._thread = threading.Thread(target=self._work, name="finray-batch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self._models is not None:
            self._models.batcher.run()

    def names(self) -> list[str]:
        """The models that are served."""
        return [self._classifier.name] if self._classifier is not None else self._answers().names()

    def _answers(self) -> Models:
        if self._models is None:
            raise ApiError(404, f"`{self.names()[0]}` is a classifier: use /v1/classify or /v1/score")
        return self._models

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait up to ``seconds`` for running ones; returns whether all have ended."""
        self._is_stopping = True
        end = time.monotonic() + seconds
        while self._requests and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        ended = not self._requests
        if self._models is not None:
            self._models.batcher.close()
        return ended

    def app(self) -> App:
        """The web application."""
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/health", self._health, methods=get),
            Route("/ready", self._ready, methods=get),
            Route("/v1/models", self._list, methods=get),
            Route("/v1/models/{name:path}", self._model, methods=get),
            Route("/v1/chat/completions", self._chat, methods=post),
            Route("/v1/completions", self._complete, methods=post),
            *(Route(f"{root}/classify", self._classify, methods=post) for root in ("/v1", "")),
            *(Route(f"{root}/score", self._classify, methods=post) for root in ("/v1", "")),
            Route("/v1/adapters", self._list_adapters, methods=get),
            Route("/v1/adapters", self._add, methods=post),
            Route("/v1/load_lora_adapter", self._add, methods=post),
            Route("/v1/adapters/{name:path}", self._remove, methods=["DELETE"]),
            Route("/v1/unload_lora_adapter", self._remove, methods=post),
        ]
        return App(routes, self._refusal, self._running)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Counts a request that :meth:`drain` waits for."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def _refusal(self, request: Request) -> ApiError | None:
        """The reason to refuse a request immediately, if any."""
        is_free = request.scope["path"] in _FREE
        if (refusal := self._access.refusal(request.headers, needs_key=not is_free)) is not None or is_free:
            return refusal
        if self._is_stopping:
            return ApiError(503, "the server is shutting down", retry_after=5)
        # A page of another origin may post text to this machine, but JSON needs a CORS preflight.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return ApiError(415, "send the body as application/json")
        return None

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        if self._models is None:
            assert self._classifier is not None
            counts, alive, more = self._classifier.counts(), True, {}
        else:
            batcher = self._models.batcher
            counts, alive, more = batcher.counts(), self._thread.is_alive(), {"tokens": batcher.written}
        content = {"status": "ok" if alive else "failed", "running": counts[0], "waiting": counts[1], **more}
        return JSONResponse(content, 200 if alive else 500)

    async def _ready(self, request: Request) -> Response:
        if self._is_stopping:
            return JSONResponse({"status": "stopping"}, 503)
        return await self._health(request)

    async def _list(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"object": "list", "data": self._documents()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for document in self._documents():
            if document["id"] == name:
                return JSONResponse(document)
        raise no_model(name, self.names())

    def _documents(self) -> list[dict[str, Any]]:
        if self._models is None:
            assert self._classifier is not None
            return [self._classifier.document()]
        return [model.document(self._models.max_length) for model in self._models.all()]

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        models = self._answers()
        parsed = protocol.parse(kind, await _body(request))
        options: Any = {"loop": asyncio.get_running_loop(), "max_new_tokens": self._settings.max_new_tokens}
        # Prompts are made in a few threads: no more of them may wait there than in the queue.
        if self._preparing >= max(self._settings.slots, self._settings.max_queue):
            raise queue_full()
        self._preparing += 1
        try:
            with caused_by_request("messages" if kind is ChatRequest else "prompt"):
                exchange = await asyncio.to_thread(lambda: Exchange(models, parsed, **options))
        finally:
            self._preparing -= 1
        exchange.submit()
        if parsed.stream:
            return _Events(exchange)
        try:
            return JSONResponse(await _unless_gone(request, exchange.whole()))
        finally:
            exchange.drop()

    async def _classify(self, request: Request) -> Response:
        if self._classifier is None:
            raise ApiError(404, "no classifier is served here: use /v1/chat/completions or /v1/completions")
        content, is_scored = await _body(request), request.scope["path"].endswith("score")
        parsed = protocol.parse(ScoreRequest, content) if is_scored else protocol.parse(ClassifyRequest, content)
        with self._classifier.place(), caused_by_request("input"):
            return JSONResponse(await asyncio.to_thread(self._classifier.answer, parsed))

    async def _list_adapters(self, request: Request) -> Response:  # noqa: ARG002
        models = self._answers()
        adapters = [model.document(models.max_length) for model in models.all() if model.adapter is not None]
        return JSONResponse({"object": "list", "data": adapters})

    async def _add(self, request: Request) -> Response:
        models = self._answers()
        parsed = protocol.parse(AdapterRequest, await _body(request))
        with caused_by_request("name"):
            models.require_room_for(parsed.name)
        made = await self._loader.run(lambda attempt: models.add(parsed.name, parsed.path, attempt))
        return JSONResponse(made.document(models.max_length))

    async def _remove(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is None:
            name = protocol.parse(RemovalRequest, await _body(request)).lora_name
        self._answers().remove(name)
        return JSONResponse({"id": name, "object": "model", "deleted": True})


class App:
    """A web application, all of whose paths go through one check.

    Args:
        routes: its paths.
        refusal: the reason to refuse a request immediately, if any.
        running: context of each request that is not refused.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        refusal: Callable[[Request], ApiError | None],
        running: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.routes, self._refusal, self._running = routes, refusal, running
        handlers: dict[Any, Any] = {ApiError: _refuse, HTTPException: _refuse_route, Exception: _fail}
        self._inner = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect would lead to whatever the Host header says.
        self._inner.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see ASGI."""
        if scope["type"] != "http":
            # Starlette closes WebSockets.
            await self._inner(scope, receive, send)
        elif (refusal := self._refusal(Request(scope))) is not None:
            await _document(refusal)(scope, receive, send)
        else:
            with self._running():
                await self._inner(scope, receive, send)


class _Events(StreamingResponse):
    """A streamed answer; its rows are freed however it ends."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.drop()


async def _body(request: Request) -> bytes:
    """The body of a request. Raises ApiError: it is too long, or does not arrive."""
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > protocol.MAX_BODY:
                    raise ApiError(413, f"the request has more than {protocol.MAX_BODY:,} bytes; shorten it")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_S:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    return bytes(content)


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Await an answer while the client stays connected. Raises ApiError: the client has disconnected."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waits: list[asyncio.Task[Any]] = [asyncio.ensure_future(answer), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not waits[0].done():
            raise ApiError(499, "the client closed the connection")
        document: dict[str, Any] = waits[0].result()
        return document
    finally:
        for wait in waits:
            wait.cancel()


def _document(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


async def _refuse(request: Request, error: ApiError) -> Response:  # noqa: ARG001
    return _document(error)


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    # Not `request.url`, which is made of the Host header.
    what = readable(f"{request.method} {request.scope['path']}", 120)
    return _document(ApiError(error.status_code, f"there is no {what}; `finray serve` answers at /v1"))


async def _fail(request: Request, error: Exception) -> Response:  # noqa: ARG001
    logger.error("a request failed\n%s", redact_error(error))
    return _document(ApiError(500, of_server(error)))
