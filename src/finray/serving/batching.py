"""The batch that all requests share: rows join and leave between the steps of one engine, each with its own adapter.

One thread owns the model. Others submit jobs and receive events through ``on_event``. Each step is one forward pass: a
token for every running row, and the whole prompt of new rows.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from finray.config.redact import redact_error
from finray.errors import ModelError
from finray.evaluation.engines.sampling import NO_TOKEN, likeliest
from finray.evaluation.engines.transformers import PASS_TOKENS, RunningRow, TransformersEngine, close_gaps, take
from finray.evaluation.generate import TextStream
from finray.models.many_adapters import ManyAdapters
from finray.models.slots import Slots
from finray.serving.errors import ApiError, is_out_of_memory, of_server, queue_full

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token, with its log-probability (natural logarithm) and those of the most likely ones.

    They are the model's own: before temperature, ``top_p`` and a repetition penalty.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprob_of(token: int, logprob: float, top: Iterable[tuple[int, float]]) -> TokenLogprob:
    """With the lowest that JSON clients know in the place of minus infinity, as in OpenAI's API."""
    return TokenLogprob(token, max(logprob, _LOWEST), tuple((other, max(value, _LOWEST)) for other, value in top))


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text, and the tokens chosen since the previous piece."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerFinished:
    """The end of an answer: why (``stop`` or ``length``), and its number of tokens."""

    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """A failed answer, with its HTTP status."""

    message: str
    status: int = 500


Event = TextPiece | AnswerFinished | AnswerFailed


@dataclass(slots=True, kw_only=True, eq=False)
class ServeJob(RunningRow):
    """A row and its client.

    Attributes:
        adapter: adapter to apply, as named in the engine; None for the base model.
        tokenizer: of the requested model.
        on_event: called with each event, in the thread of the batch.
        top: number of most likely tokens to return; None means no probabilities.
        is_dropped: the client has disconnected.
        is_suspect: it was in a step that failed; the next one takes no other new row.
    """

    adapter: Any | None
    tokenizer: Any
    on_event: Callable[[Event], None]
    top: int | None = None
    is_dropped: bool = False
    is_suspect: bool = False
    stream: TextStream = field(init=False)
    pieces: list[str] = field(default_factory=list)
    chosen: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer, self.sampling.stop, self.pieces.append)


class Queue:
    """Waiting and running rows, for any engine.

    Args:
        slots: maximum number of rows processed at the same time.
        max_queue: maximum number of rows waiting for a slot.
    """

    def __init__(self, *, slots: int, max_queue: int) -> None:
        self._count, self._max_queue = slots, max_queue
        self._wake = threading.Condition()
        self._waiting, self._working = deque[ServeJob](), list[ServeJob]()
        self._calls = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._is_closed = False
        # Tokens generated since the start.
        self.written = 0

    def counts(self) -> tuple[int, int]:
        """(running rows, waiting rows)."""
        with self._wake:
            return len(self._working), len(self._waiting)

    def submit(self, jobs: Sequence[ServeJob]) -> None:
        """Queue jobs, all of them or none. Raises ApiError: the queue is full."""
        with self._wake:
            self.require_room(len(jobs))
            self._waiting.extend(jobs)
            self._wake.notify_all()

    def require_room(self, rows: int) -> None:
        """Refuse a request for more rows than may wait.
        Raises ApiError: the queue is full or closed, or never has room for so many."""
        most = self._count + self._max_queue
        if rows > most:
            message = f"the request asks for {rows:,} answers (prompts times n); this server takes at most {most:,}"
            raise ApiError(400, message, param="n")
        with self._wake:
            if self._is_closed:
                raise _stopping()
            if rows > most - len(self._working) - len(self._waiting):
                raise queue_full()

    def drop(self, jobs: Sequence[ServeJob]) -> None:
        """Cancel jobs whose client is gone: their slots and memory are free before the next step."""
        with self._wake:
            for job in jobs:
                job.is_dropped = True
                with suppress(ValueError):
                    self._waiting.remove(job)
            self._wake.notify_all()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function that needs the model, between two steps."""
        future: Future[Result] = Future()
        with self._wake:
            if self._is_closed:
                future.set_exception(_stopping())
            else:
                self._calls.append((function, future))
            self._wake.notify_all()
        return future

    def run(self) -> None:
        """Run until :meth:`close`."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._is_closed or self._waiting or self._working or self._calls)
                    if self._is_closed:
                        return
                self.advance()
        except BaseException:
            # Nobody works any more: who waits would wait for ever.
            self.close()
            raise

    def close(self) -> None:
        """Refuse new jobs and calls, and end the current ones."""
        with self._wake:
            self._is_closed = True
            jobs, calls = [*self._working, *self._waiting], list(self._calls)
            self._waiting.clear()
            self._calls.clear()
            self._wake.notify_all()
        for _, future in calls:
            future.set_exception(_stopping())
        for job in jobs:
            if not job.is_done:
                job.on_event(AnswerFailed("the server has stopped"))

    def advance(self) -> None:
        """One step, after the functions that were to be called between steps."""
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
        """Generate a token for every running row."""
        raise NotImplementedError

    def give(self, job: ServeJob, token: int) -> None:
        """Append the next token to a row, and report the text that it completes."""
        answer = take(job, token, job.tokenizer, job.stream.token)
        if answer is not None:
            if job.chosen and token in job.ends:
                # The token that ends an answer is not part of it.
                job.chosen.pop()
            job.stream.end(answer.text)
        if job.pieces or (answer is not None and job.chosen):
            job.on_event(TextPiece("".join(job.pieces), tuple(job.chosen)))
            job.pieces.clear()
            job.chosen.clear()
        if answer is not None:
            job.on_event(AnswerFinished(answer.finish, len(job.output_ids)))

    def give_safely(self, job: ServeJob, token: int) -> None:
        """As :meth:`give`; whatever goes wrong with this row is its own failure."""
        try:
            self.give(job, token)
        except Exception as error:
            self.fail([job], error)

    @staticmethod
    def fail(jobs: Sequence[ServeJob], error: Exception) -> None:
        """Report to the clients of these jobs that they have failed."""
        if isinstance(error, ModelError):
            # Such as logits that are not finite: the next request of this kind fails as well.
            failed = AnswerFailed(f"{error.message}; {error.repair}" if error.repair else error.message, 422)
        elif is_out_of_memory(error) and len(jobs) == 1:
            what = f"prompt and answer of up to {len(jobs[0].prompt) + jobs[0].room:,} tokens"
            failed = AnswerFailed(f"out of memory: the server has no room for {what}; shorten them", 413)
        else:
            failed = AnswerFailed(of_server(error))
        if not isinstance(error, ModelError):
            logger.error("a step failed\n%s", redact_error(error))
        for job in jobs:
            if not job.is_done:
                job.is_done = True
                job.on_event(failed)


def _stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", retry_after=5)


class Batcher(Queue):
    """The batch of finray's own engine.

    Args:
        engine: around a model without adapters.
        adapters: of that model.
        slots, max_queue: as for :class:`Queue`.
    """

    def __init__(self, engine: TransformersEngine, adapters: ManyAdapters, *, slots: int, max_queue: int) -> None:
        super().__init__(slots=slots if engine.has_slots else 1, max_queue=max_queue)
        self._engine, self._adapters = engine, adapters
        self._slots = Slots(self._count)

    @torch.inference_mode()
    def work(self) -> None:
        """One forward pass."""
        jobs = list[ServeJob]()
        try:
            jobs = self._admitted()
            if jobs and self._engine.has_slots:
                self._step(jobs)
            elif jobs:
                self._alone(jobs[0])
        except Exception as error:
            self._recover(jobs, error)
        with self._wake:
            self._leave()
            self._wake.notify_all()

    def _recover(self, jobs: Sequence[ServeJob], error: Exception) -> None:
        """After a step that failed: end the rows that may have caused it, and no others.

        No row has got its token in that step, so the next one repeats it. New rows come again one at a time.
        """
        coming = [job for job in jobs if not (job.output_ids or job.is_done)]
        running = [job for job in jobs if job.output_ids and not job.is_done]
        if len(coming) > 1:
            logger.warning("a step failed; its new rows are tried one at a time\n%s", redact_error(error))
            for slot, job in enumerate(jobs):
                if job in coming:
                    # Another row may come to this slot before them.
                    self._slots.clear(slot, job.length)
            with self._wake:
                for job in reversed(coming):
                    job.is_suspect = True
                    self._working.remove(job)
                    self._waiting.appendleft(job)
        elif coming and self._engine.has_slots:
            self.fail(coming, error)
        elif is_out_of_memory(error) and len(running) > 1:
            self.fail([max(running, key=lambda job: job.length)], error)
        else:
            self.fail(jobs, error)
            self._slots = Slots(self._count)

    def _leave(self) -> None:
        """Free the slots of finished rows."""
        lengths = [job.length for job in self._working]
        for slot, job in enumerate(self._working):
            if job.is_done:
                self._slots.clear(slot, lengths[slot])
        close_gaps(self._slots, self._working)
        # Those that were moved to another slot.
        for slot in range(len(self._working), len(lengths)):
            self._slots.clear(slot, lengths[slot])

    def _admitted(self) -> list[ServeJob]:
        """The rows of the next step: running ones first, then new ones."""
        with self._wake:
            for job in self._working:
                job.is_done |= job.is_dropped
            self._leave()
            if not self._working:
                # Free the memory of the longest rows so far.
                self._slots = Slots(self._count)
            tokens, limit = 0, PASS_TOKENS[self._engine.model.device.type]
            while self._waiting and len(self._working) < self._count:
                job = self._waiting[0]
                tokens += len(job.prompt)
                is_first = tokens == len(job.prompt)
                if not is_first and (tokens > limit or job.is_suspect):
                    break
                self._working.append(self._waiting.popleft())
                if job.is_suspect:
                    break
            return list(self._working)

    def _step(self, jobs: Sequence[ServeJob]) -> None:
        working = [job for job in jobs if job.output_ids]
        coming = [job for job in jobs if not job.output_ids]
        pieces = [(job.adapter, 1) for job in working] + [(job.adapter, len(job.prompt)) for job in coming]
        pieces += [(working[slot].adapter, working[slot].length) for slot in self._engine.anew(working)]
        with self._adapters.rows(pieces):
            logits_BV = self._engine.step(self._slots, working, coming)
        wanted = [number for number, job in enumerate(jobs) if job.top is not None]
        before = {number: logits_BV[number].float().log_softmax(-1) for number in wanted}
        self._engine.penalise(logits_BV, jobs)
        tokens = self._chosen(logits_BV, jobs)
        self.written += len(tokens)
        for number, job in enumerate(jobs):
            token = tokens[number]
            if number in before and token != NO_TOKEN:
                top = before[number].topk(job.top or 0)
                best = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                job.chosen.append(logprob_of(token, float(before[number][token]), best))
            self.give_safely(job, token)

    @staticmethod
    def _chosen(logits_BV: torch.Tensor, jobs: Sequence[ServeJob]) -> list[int]:
        """The next token of each row, by its own sampling settings."""
        tokens: list[int] = likeliest(logits_BV).tolist()
        alike = dict[tuple[float, float, int], list[int]]()
        for number, job in enumerate(jobs):
            if job.sampling.temperature:
                kind = job.sampling.temperature, job.sampling.top_p, job.sampling.top_k
                alike.setdefault(kind, []).append(number)
        for numbers in alike.values():
            drawn = [jobs[row].sampling.uniform(jobs[row].number, len(jobs[row].output_ids)) for row in numbers]
            sampled = jobs[numbers[0]].sampling.draw(logits_BV[numbers], drawn).tolist()
            for number, token in zip(numbers, sampled, strict=True):
                tokens[number] = token
        return tokens

    def _alone(self, job: ServeJob) -> None:
        """Generate a row whose model cannot batch, by Transformers' own ``generate``."""

        def on_token(row: int, token: int) -> None:
            if job.is_dropped:
                raise _DroppedError
            self.written += 1
            job.stream.token(row, token)
            if job.pieces:
                job.on_event(TextPiece("".join(job.pieces)))
                job.pieces.clear()

        try:
            with self._adapters.rows([(job.adapter, 1)]):
                (answer,) = self._engine.in_batches([job], job.sampling, adapter=True, on_token=on_token)
        except _DroppedError:
            job.is_done = True
            return
        job.stream.end(answer.text)
        if job.pieces:
            job.on_event(TextPiece("".join(job.pieces)))
        job.on_event(AnswerFinished(answer.finish, len(job.output_ids)))


class _DroppedError(Exception):
    """Ends a call of ``generate`` whose client is gone."""
