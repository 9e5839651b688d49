"""From a request to the batch and back: prompts as in training, and answers in OpenAI's format."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finray.data.formats.convert import in_form
from finray.data.formats.messages import messages_of, template_arguments, tools_of
from finray.errors import FinrayError
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.prompts import Prompt
from finray.serving import protocol
from finray.serving.batching import AnswerFailed, AnswerFinished, Event, ServeJob, TextPiece, TokenLogprob
from finray.serving.errors import ApiError, of_request
from finray.serving.models import Models
from finray.serving.protocol import ChatRequest, CompletionRequest, GenerateRequest

# Default of `max_tokens` for completions; OpenAI's.
_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class AnswerChoice:
    """One answer of a response, as far as it is generated."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    tokens: int = 0


class Exchange:
    """One request in progress: its jobs, and their events in order of arrival.

    Args:
        models: of the server.
        request: the parsed request.
        loop: event loop that receives the answers; an exchange may be created in another thread, because prompts take
            time.
        max_new_tokens: default for a conversation.
        draw: draws a seed if the request has none.
    """

    def __init__(
        self,
        models: Models,
        request: ChatRequest | CompletionRequest,
        *,
        loop: asyncio.AbstractEventLoop,
        max_new_tokens: int,
        draw: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.served = models.get(request.model)
        self.request, self._models = request, models
        self._is_chat = isinstance(request, ChatRequest)
        # A short body may ask for very many answers: before anything is made of it.
        models.batcher.require_room(
            (1 if isinstance(request, ChatRequest) else len(request.prompts())) * (request.n or 1)
        )
        self._prompts = self._prompt_ids()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = loop
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        limits = request.max_tokens
        if isinstance(request, ChatRequest):
            limits = request.max_completion_tokens or request.max_tokens or max_new_tokens
        self._sampling = _sampling(request, limits or _COMPLETION_TOKENS, draw)
        self.jobs = [
            self._job(number, prompt)
            for number, prompt in enumerate(prompt for prompt in self._prompts for _ in self._copies)
        ]

    @property
    def _copies(self) -> range:
        return range(self.request.n or 1)

    def _prompt_ids(self) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError: the prompts do not fit this model, or are too long."""
        asking, request, limit = self.served.asking, self.request, self._models.max_length
        try:
            if isinstance(request, ChatRequest):
                if (why := asking.why_no_chat) is not None:
                    message = (
                        f"a conversation needs a chat template, but `{self.served.name}` {why}; use /v1/completions"
                    )
                    raise ApiError(400, message, param="messages")
                protocol.require_text(request.messages, "messages")
                messages = tuple(turn.whole() for turn in messages_of(request.messages, "messages"))
                tools = () if request.tool_choice == "none" else tools_of(request.tools)
                variables = template_arguments(request.chat_template_kwargs)
                prompts = [asking.ids(Prompt(messages=messages, tools=tools, arguments=variables))]
                param = "messages"
            else:
                param, prompts = "prompt", []
                for prompt in request.prompts():
                    protocol.require_text(prompt, param)
                    form = asking.form if asking.raw else None
                    text = in_form(form, prompt) if form is not None and isinstance(prompt, str) else prompt
                    prompts.append(list(asking.tokenizer(text)["input_ids"] if isinstance(text, str) else text))
        except FinrayError as error:
            raise of_request(error, "messages" if isinstance(request, ChatRequest) else "prompt") from None
        words = min(len(asking.tokenizer), self._models.vocabulary)
        if not prompts or not all(prompts):
            raise ApiError(400, "the prompt is empty", param=param)
        if any(not 0 <= token < words for prompt in prompts for token in prompt):
            raise ApiError(400, f"token ids must be from 0 to {words - 1}", param=param)
        longest = max(map(len, prompts))
        if limit is not None and longest >= limit:
            message = f"the prompt has {longest:,} tokens; prompt and answer together may have {limit:,}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return prompts

    def _job(self, number: int, prompt: list[int]) -> ServeJob:
        limit = self._models.max_length
        room = self._sampling.max_new_tokens if limit is None else limit - len(prompt)
        request = self.request
        top = request.top() if isinstance(request, ChatRequest) else request.logprobs
        if top is not None and not self._models.has_logprobs:
            raise ApiError(400, "this model does not return log-probabilities", param="logprobs")

        def on_event(event: Event) -> None:
            # A closed loop has no waiting client.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        return ServeJob(
            number=number,
            prompt=prompt,
            room=min(room, self._sampling.max_new_tokens),
            sampling=self._sampling,
            ends=self.served.ends,
            adapter=self.served.adapter,
            tokenizer=self.served.asking.tokenizer,
            on_event=on_event,
            top=top,
        )

    async def _received(self) -> AsyncIterator[tuple[int, Event]]:
        """Events until every answer is complete. Raises ApiError: an answer failed."""
        left = len(self.jobs)
        while left:
            number, event = await self._events.get()
            if isinstance(event, AnswerFailed):
                raise ApiError(event.status, event.message)
            left -= isinstance(event, AnswerFinished)
            yield number, event

    def submit(self) -> None:
        """Queue the jobs. Raises ApiError: the queue is full."""
        self._models.batcher.submit(self.jobs)

    def drop(self) -> None:
        """Cancel the answers, because the client is gone; completed ones are not affected."""
        self._models.batcher.drop([job for job in self.jobs if not job.is_done])

    async def whole(self) -> dict[str, Any]:
        """The response, once every answer is complete."""
        choices = [AnswerChoice() for _ in self.jobs]
        async for number, event in self._received():
            _take(choices[number], event)
        documents = []
        for number, choice in enumerate(choices):
            logprobs = self._logprobs(choice.logprobs) if self.jobs[number].top is not None else None
            content: dict[str, Any] = {"text": choice.text}
            if self._is_chat:
                content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            documents.append({"index": number, "finish_reason": choice.reason, "logprobs": logprobs, **content})
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head(kind), "choices": documents, "usage": self._usage(choices)}

    async def stream(self) -> AsyncIterator[str]:
        """The response as server-sent events; an answer that fails ends it with an error."""
        request, choices = self.request, [AnswerChoice() for _ in self.jobs]
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        options = request.stream_options
        with_usage = {"usage": None} if options is not None and options.include_usage else {}
        try:
            if self._is_chat:
                for number in range(len(choices)):
                    first = {"role": "assistant", "content": ""}
                    yield protocol.event({**self._head(kind), "choices": [_delta(number, first)], **with_usage})
            async for number, event in self._received():
                at = len(choices[number].text)
                _take(choices[number], event)
                choice = self._chunk_choice(number, event, at)
                yield protocol.event({**self._head(kind), "choices": [choice], **with_usage})
        except ApiError as error:
            yield protocol.event(error.body())
        else:
            if with_usage:
                yield protocol.event({**self._head(kind), "choices": [], "usage": self._usage(choices)})
        yield protocol.DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.served.name}

    def _usage(self, choices: Sequence[AnswerChoice]) -> dict[str, int]:
        return protocol.usage(sum(map(len, self._prompts)), sum(choice.tokens for choice in choices))

    def _chunk_choice(self, number: int, event: Event, at: int) -> dict[str, Any]:
        text = event.text if isinstance(event, TextPiece) else ""
        reason = event.reason if isinstance(event, AnswerFinished) else None
        logprobs = self._logprobs(event.logprobs, at) if isinstance(event, TextPiece) and event.logprobs else None
        if self._is_chat:
            return {**_delta(number, {"content": text} if text else {}, reason), "logprobs": logprobs}
        return {"index": number, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, chosen: Sequence[TokenLogprob], at: int = 0) -> dict[str, Any]:
        tokenizer = self.served.asking.tokenizer
        if self._is_chat:
            return protocol.chat_logprobs(tokenizer, chosen)
        return protocol.completion_logprobs(tokenizer, chosen, at)


def _delta(number: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "finish_reason": reason}


def _take(choice: AnswerChoice, event: Event) -> None:
    if isinstance(event, TextPiece):
        choice.text += event.text
        choice.logprobs += event.logprobs
    elif isinstance(event, AnswerFinished):
        choice.reason, choice.tokens = event.reason, event.tokens


def _sampling(request: GenerateRequest, max_new_tokens: int, draw: Callable[[], int]) -> Sampling:
    """Sampling settings of all answers; each answer has its own random numbers, by index."""
    temperature = 1.0 if request.temperature is None else request.temperature
    try:
        return Sampling(
            max_new_tokens,
            temperature,
            1.0 if request.top_p is None else request.top_p,
            draw() if request.seed is None else request.seed % 2**63,
            request.top_k or 0,
            request.stops(),
        )
    except FinrayError as error:
        # Of what a request may ask for, it refuses nothing but a temperature just above 0.
        param = (error.where or "").removeprefix("--").replace("-", "_")
        wanted = f"must be {type(request).model_fields[param].description}"
        raise ApiError(400, f"`{param}` {wanted}", param=param) from None
