"""Examples as token ids with a loss mask.

Text is tokenised once and masks are read off token offsets. Where one token would straddle the border between prompt
and answer, the two sides are tokenised apart, because that is what a server does: it tokenises the prompt alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from finray.data.formats import Chat, Completion, Example, Text
from finray.data.templates import ChatRenderer, Span
from finray.errors import DataError

TrainOn = Literal["completion", "last_assistant", "all"]
OnTooLong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row for training.

    Attributes:
        ids: token ids.
        mask: 1 where the token is learned (is a target of the loss), else 0; same length as ``ids``.
        truncated: whether tokens were cut off to fit.
    """

    ids: list[int]
    mask: list[int]
    truncated: bool = False

    @property
    def supervised(self) -> int:
        """Targets in the row. The first token is never one: nothing predicts it."""
        return sum(self.mask[1:])


@dataclass(frozen=True, slots=True)
class _Job:
    """Text to tokenise: learned spans, and ids to put before and after."""

    text: str
    spans: tuple[Span, ...]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """Turns examples into tokens with a Transformers fast tokenizer.

    Args:
        tokenizer: a Transformers tokenizer backed by the Rust library.
        train_on: which tokens are learned.
        max_length: most tokens in a row.
        on_too_long: what happens to a conversation or completion that is longer; plain text is always cut into pieces.

    Raises:
        DataError: the tokenizer has no Rust back end, or no end-of-sequence token where one is needed.
    """

    def __init__(self, tokenizer: Any, *, train_on: TrainOn, max_length: int, on_too_long: OnTooLong) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "encode_batch"):
            raise DataError("the tokenizer has no fast (Rust) version", where="model.name")
        self._tokenizer = tokenizer
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._train_on = train_on
        self._max_length = max_length
        self._on_too_long = on_too_long
        self._renderer: ChatRenderer | None = None
        self._bos = _leading_special_ids(tokenizer)

    @property
    def renderer(self) -> ChatRenderer:
        """The chat renderer, made when the first conversation is met, so that plain text needs no template."""
        if self._renderer is None:
            added = self._tokenizer.added_tokens_decoder.values()
            special = {str(token.content) for token in added if token.special}
            self._renderer = ChatRenderer(self._tokenizer, special)
        return self._renderer

    def encode(self, examples: Sequence[Example]) -> list[list[Tokens]]:
        """Tokenise a batch: for each example its rows (several for long plain text, none when dropped).

        Raises:
            DataError: an example cannot be tokenised; ``where`` is left to the caller, who knows file and row.
        """
        jobs = [self._job(example) for example in examples]
        encodings = self._backend.encode_batch([job.text for job in jobs], add_special_tokens=False)
        rows = []
        for example, job, encoding in zip(examples, jobs, encodings, strict=True):
            ids, mask = self._masked(job, encoding)
            ids = [*job.prefix, *ids, *job.suffix]
            mask = [0] * len(job.prefix) + mask + [1] * len(job.suffix)
            rows.append(self._fit(ids, mask, chunked=isinstance(example, Text)))
        return rows

    def _job(self, example: Example) -> _Job:
        if isinstance(example, Text):
            return _Job(example.text, ((0, len(example.text)),), self._bos, self._eos())
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            start = 0 if self._train_on == "all" else len(example.prompt)
            return _Job(text, ((start, len(text)),), self._bos, self._eos())
        return self._chat_job(example)

    def _chat_job(self, chat: Chat) -> _Job:
        assistants = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        wanted = set(assistants[-1:] if self._train_on == "last_assistant" else assistants)
        if self._train_on == "all":
            return self._whole_chat_job(chat)
        learned = {index for index in wanted if chat.messages[index].train}
        rendered = self.renderer.render_with_spans(chat.messages, learned=learned.__contains__)
        needs_end = (
            bool(rendered.spans) and not rendered.ends[-1] and not rendered.text[rendered.spans[-1][1] :].strip()
        )
        return _Job(rendered.text, rendered.spans, suffix=self._eos() if needs_end else ())

    def _whole_chat_job(self, chat: Chat) -> _Job:
        """Everything is learned but messages that forbid it."""
        forbidden = {index for index, message in enumerate(chat.messages) if not message.train}
        if not forbidden:
            text = self.renderer.render(chat.messages)
            return _Job(text, ((0, len(text)),), suffix=() if self.renderer.ends_turn(text) else self._eos())
        rendered = self.renderer.render_with_spans(chat.messages, learned=forbidden.__contains__)
        borders = [0, *(border for span in rendered.spans for border in span), len(rendered.text)]
        spans = tuple((start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=True) if start < stop)
        return _Job(rendered.text, spans, suffix=() if self.renderer.ends_turn(rendered.text) else self._eos())

    def _eos(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model could not learn to stop",
                where="model.name",
                repair="use a tokenizer with an eos_token",
            )
        return (int(eos),)

    def _masked(self, job: _Job, encoding: Any) -> tuple[list[int], list[int]]:
        ids: list[int] = encoding.ids
        ends = [stop for _, stop in encoding.offsets]
        mask = [0] * len(ids)
        for start, stop in job.spans:
            first = bisect_right(ends, start)
            previous_end = ends[first - 1] if first else 0
            if first < len(ids) and previous_end < start < ends[first]:
                return self._masked_apart(job)
            last = bisect_right(ends, stop)
            if last < len(ids) and (ends[last - 1] if last else 0) < stop:
                last += 1
            mask[first:last] = [1] * (last - first)
        return ids, mask

    def _masked_apart(self, job: _Job) -> tuple[list[int], list[int]]:
        """Tokenise at the borders of learned spans, so that no token straddles one."""
        borders = [0, *(border for span in job.spans for border in span), len(job.text)]
        pieces = [job.text[start:stop] for start, stop in pairwise(borders)]
        encoded = self._backend.encode_batch(pieces, add_special_tokens=False)
        ids = [token for piece in encoded for token in piece.ids]
        mask = [index % 2 for index, piece in enumerate(encoded) for _ in piece.ids]
        if self._decode(ids) != self._decode(self._backend.encode(job.text, add_special_tokens=False).ids):
            raise DataError(
                "a token joins the end of the prompt with the start of the answer, and this tokenizer cannot split it",
                repair="end the prompt with a newline, or move the space between them to one side",
            )
        return ids, mask

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _fit(self, ids: list[int], mask: list[int], *, chunked: bool) -> list[Tokens]:
        limit = self._max_length
        if len(ids) <= limit:
            return [Tokens(ids, mask)]
        if chunked:
            return [Tokens(ids[at : at + limit], mask[at : at + limit]) for at in range(0, len(ids), limit)]
        if self._on_too_long == "drop":
            return []
        if self._on_too_long == "error":
            raise DataError(
                f"the row has {len(ids)} tokens, data.max_length is {limit}",
                repair="raise data.max_length, or set data.on_too_long to truncate or drop",
            )
        return [Tokens(ids[:limit], mask[:limit], truncated=True)]


def _leading_special_ids(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text (BOS, for the models that want one)."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return (int(bos),) if bos is not None and ids and ids[0] == bos else ()
