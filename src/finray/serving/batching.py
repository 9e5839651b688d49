"""The batch that all requests share: rows come and go between the steps of one engine, each with its own adapter.

One thread owns the model. Others hand it jobs and hear of them through ``tell``. Each step is one forward pass: a token
for every row at work, and the whole prompt of those that have just come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from finray.evaluation.engines.transformers import PASS_TOKENS, Row, TransformersEngine, close_gaps, take
from finray.evaluation.generate import TextStream
from finray.models.many_adapters import ManyAdapters
from finray.models.slots import Slots
from finray.serving.errors import ApiError, of_server

logger = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was chosen, with the natural logarithm of its probability and those of the likeliest ones.

    They are the model's own: before temperature, ``top_p`` and a repetition penalty.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that has become known, and the tokens that were chosen since the piece before."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: why (``stop`` or ``length``), and its number of tokens."""

    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer that will not come to its end."""

    message: str


Event = Piece | Finished | Failed


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Row):
    """A row with whom it is for.

    Attributes:
        adapter: that takes part, as the engine knows it; None for the base model.
        tokenizer: of the model that is asked.
        tell: is given each event, in the thread of the batch.
        top: likeliest tokens to tell of; None where no probabilities are asked for.
        is_dropped: nobody waits for it any more.
    """

    adapter: Any | None
    tokenizer: Any
    tell: Callable[[Event], None]
    top: int | None = None
    is_dropped: bool = False
    stream: TextStream = field(init=False)
    pieces: list[str] = field(default_factory=list)
    chosen: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer, self.sampling.stop, self.pieces.append)


class Queue:
    """Rows that wait and rows at work, whatever engine works on them.

    Args:
        slots: rows at work at the same time, at most.
        max_queue: rows that wait for a slot, at most.
    """

    def __init__(self, *, slots: int, max_queue: int) -> None:
        self._count, self._max_queue = slots, max_queue
        self._wake = threading.Condition()
        self._waiting, self._working = deque[Job](), list[Job]()
        self._calls = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._is_closed = False
        # Tokens that were written since the start.
        self.written = 0

    def counts(self) -> tuple[int, int]:
        """(rows at work, rows that wait)."""
        with self._wake:
            return len(self._working), len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put jobs in the queue, all of them or none.

        Raises:
            ApiError: the queue is full.
        """
        with self._wake:
            free = self._count - len(self._working) + self._max_queue - len(self._waiting)
            if self._is_closed:
                raise ApiError(503, "the server is about to stop", retry_after=5)
            if len(jobs) > free:
                raise ApiError(429, "too many requests are waiting; try again", code="queue_full", retry_after=1)
            self._waiting.extend(jobs)
            self._wake.notify_all()

    def drop(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more: what they hold is free before the next step."""
        with self._wake:
            for job in jobs:
                job.is_dropped = True
                with suppress(ValueError):
                    self._waiting.remove(job)
            self._wake.notify_all()

    def call(self, function: Callable[[], Found]) -> Future[Found]:
        """Call a function that needs the model, between two steps."""
        future: Future[Found] = Future()
        with self._wake:
            self._calls.append((function, future))
            self._wake.notify_all()
        return future

    def run(self) -> None:
        """Work until :meth:`close`."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closed or self._waiting or self._working or self._calls)
                if self._is_closed:
                    return
            self.advance()

    def close(self) -> None:
        """Take no more jobs, and end those that are there."""
        with self._wake:
            self._is_closed = True
            jobs = [*self._working, *self._waiting]
            self._waiting.clear()
            self._wake.notify_all()
        for job in jobs:
            if not job.is_done:
                job.tell(Failed("the server has stopped"))

    def advance(self) -> None:
        """One step, after what was asked for between steps."""
        while True:
            with self._wake:
                if not self._calls:
                    break
                function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        self.work()

    def work(self) -> None:
        """A token for every row at work."""
        raise NotImplementedError

    def give(self, job: Job, token: int) -> None:
        """Give a row its next token, and tell what is known by it."""
        answer = take(job, token, job.tokenizer, job.stream.token)
        if answer is not None:
            if len(job.chosen) > len(job.said):
                # The token that ends an answer is not part of it.
                job.chosen.pop()
            job.stream.end(answer.text)
        if job.pieces or (answer is not None and job.chosen):
            job.tell(Piece("".join(job.pieces), tuple(job.chosen)))
            job.pieces.clear()
            job.chosen.clear()
        if answer is not None:
            job.tell(Finished(answer.finish, len(job.said)))

    @staticmethod
    def fail(jobs: Sequence[Job], error: Exception) -> None:
        """Tell everybody who waits for one of these that it will not come."""
        logger.error("a step failed", exc_info=error)
        for job in jobs:
            if not job.is_done:
                job.is_done = True
                job.tell(Failed(of_server(error)))


class Batcher(Queue):
    """The batch of finray's own engine.

    Args:
        engine: around a model without adapters.
        adapters: of that model.
        slots, max_queue: as of :class:`Queue`.
    """

    def __init__(self, engine: TransformersEngine, adapters: ManyAdapters, *, slots: int, max_queue: int) -> None:
        super().__init__(slots=slots if engine.has_slots else 1, max_queue=max_queue)
        self._engine, self._adapters = engine, adapters
        self._slots = Slots(self._count)

    @torch.inference_mode()
    def work(self) -> None:
        """One forward pass."""
        jobs = list[Job]()
        try:
            jobs = self._admitted()
            if jobs and self._engine.has_slots:
                self._step(jobs)
            elif jobs:
                self._alone(jobs[0])
        except Exception as error:
            self.fail(jobs, error)
            self._slots = Slots(self._count)
        with self._wake:
            close_gaps(self._slots, self._working)
            self._wake.notify_all()

    def _admitted(self) -> list[Job]:
        """The rows of the next step: those at work, then those that come now."""
        with self._wake:
            for job in self._working:
                job.is_done |= job.is_dropped
            close_gaps(self._slots, self._working)
            if not self._working:
                # Memory of the longest rows so far is given back.
                self._slots = Slots(self._count)
            tokens, limit = 0, PASS_TOKENS[self._engine.model.device.type]
            while self._waiting and len(self._working) < self._count:
                tokens += len(self._waiting[0].prompt)
                if tokens > limit and tokens > len(self._waiting[0].prompt):
                    break
                self._working.append(self._waiting.popleft())
            return list(self._working)

    def _step(self, jobs: Sequence[Job]) -> None:
        working = [job for job in jobs if job.said]
        coming = [job for job in jobs if not job.said]
        pieces = [(job.adapter, 1) for job in working] + [(job.adapter, len(job.prompt)) for job in coming]
        with self._adapters.rows(pieces):
            logits_BV = self._engine.step(self._slots, working, coming)
        wanted = [number for number, job in enumerate(jobs) if job.top is not None]
        before = {number: logits_BV[number].float().log_softmax(-1) for number in wanted}
        self._engine.penalise(logits_BV, jobs)
        tokens = self._chosen(logits_BV, jobs)
        self.written += len(tokens)
        for number, job in enumerate(jobs):
            token = tokens[number]
            if number in before:
                top = before[number].topk(job.top or 0)
                likeliest = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                job.chosen.append(TokenLogprob(token, float(before[number][token]), likeliest))
            self.give(job, token)

    @staticmethod
    def _chosen(logits_BV: torch.Tensor, jobs: Sequence[Job]) -> list[int]:
        """The next token of each row, as its own sampling has it."""
        tokens: list[int] = logits_BV.argmax(-1).tolist()
        alike = dict[tuple[float, float, int], list[int]]()
        for number, job in enumerate(jobs):
            if job.sampling.temperature:
                kind = job.sampling.temperature, job.sampling.top_p, job.sampling.top_k
                alike.setdefault(kind, []).append(number)
        for numbers in alike.values():
            drawn = [jobs[one].sampling.uniform(jobs[one].number, len(jobs[one].said)) for one in numbers]
            found = jobs[numbers[0]].sampling.draw(logits_BV[numbers], drawn).tolist()
            for number, token in zip(numbers, found, strict=True):
                tokens[number] = token
        return tokens

    def _alone(self, job: Job) -> None:
        """All of a row whose model cannot share a step, by Transformers' own ``generate``."""

        def told(row: int, token: int) -> None:
            if job.is_dropped:
                raise _DroppedError
            self.written += 1
            job.stream.token(row, token)
            if job.pieces:
                job.tell(Piece("".join(job.pieces)))
                job.pieces.clear()

        try:
            with self._adapters.rows([(job.adapter, 1)]):
                (answer,) = self._engine.in_batches([job], job.sampling, adapter=True, on_token=told)
        except _DroppedError:
            job.is_done = True
            return
        job.stream.end(answer.text)
        if job.pieces:
            job.tell(Piece("".join(job.pieces)))
        job.tell(Finished(answer.finish, len(job.said)))


class _DroppedError(Exception):
    """Ends a call of ``generate`` for which nobody waits."""
