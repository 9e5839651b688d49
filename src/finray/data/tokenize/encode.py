"""Converts examples to token ids with a loss mask.

Text is tokenized once, and masks follow from the positions of its tokens. If a token would straddle the border between
prompt and answer, the two sides are tokenized separately, as a server does: it tokenizes the prompt alone.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Literal

from finray.data.formats.examples import (
    Chat,
    Completion,
    Example,
    Label,
    Labelled,
    Preference,
    Text,
    Unpaired,
)
from finray.data.tokenize.chat import ChatRenderer, Span
from finray.data.tokenize.widths import Places, Widths
from finray.errors import DataError

TrainOn = Literal["completion", "assistant", "last_assistant", "all"]
OnTooLong = Literal["truncate", "drop", "error"]

# Characters before white space that may affect its tokenization, and the number of such endings cached.
_TAIL = 48
_MOST_TAILS = 4096
# Number of texts from which on it pays off to compute the widths of a vocabulary.
_MANY_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row for training."""

    ids: list[int]  # token ids
    spans: tuple[Span, ...]  # ranges of ``ids`` that are trained on (targets of the loss), in order
    truncated: bool = False  # whether tokens were cut off to fit
    label: Label | None = None  # of a labelled text
    # Of a labelled text, per token: 1 for the second text, if the model uses token types.
    token_types: tuple[int, ...] = ()
    # What an objective reads of the row, by name: a margin, a weight. All rows of a source have the same names.
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def supervised(self) -> int:
        """Number of targets in the row: 1 for a label; otherwise trained tokens, except the row's first, which nothing
        predicts."""
        if self.label is not None:
            return 1
        return sum(max(stop - max(start, 1), 0) for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result for an example."""

    # Empty if it was dropped, several for long text and for conversations that are trained on in parts.
    rows: list[Tokens]
    notes: frozenset[str] = frozenset()  # names of counters that it adds to
    dropped: int = 0  # number of rows that were too long
    dropped_tokens: int = 0  # tokens in those rows
    truncated_tokens: int = 0  # number of tokens cut off
    answers_lost: int = 0  # number of rows whose whole answer was truncated
    # Whether the rows are a group (a pair), which splits, packs, micro-batches and ranks never tear; it is learned from
    # as a whole or not at all.
    together: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """Text to tokenize: trained character spans, and ids to prepend and append (appended ones are trained on)."""

    text: str
    spans: tuple[Span, ...]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def has_borders(self) -> bool:
        """Whether a trained span begins or ends within the text."""
        end = len(self.text)
        return any(0 < start < end or 0 < stop < end for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch to tokenize: its examples, the jobs and the notes of each, all jobs, and whether they need no offsets."""

    examples: Sequence[Example]
    planned: list[tuple[list[_Job], frozenset[str]]]
    jobs: list[_Job]
    without_offsets: bool

    @property
    def characters(self) -> int:
        """Characters to tokenize."""
        labelled = (
            len(example.text) + len(example.text_pair or "")
            for example in self.examples
            if isinstance(example, Labelled)
        )
        return sum(len(job.text) for job in self.jobs) + sum(labelled)


class Tokenizer:
    """Turns examples into tokens with a Transformers fast tokenizer.

    Args:
        tokenizer: a Transformers tokenizer backed by the Rust library.
        train_on: which tokens are trained on.
        max_length: maximum tokens per row.
        on_too_long: what to do with a longer conversation or completion; plain text is always cut into pieces.
        chunk_overlap: tokens of plain text that are repeated at the start of the next piece, as context.
        template_arguments: variables given to the chat template.
        tool_format: format of tools if the chat template does not support them.
        stops: ids of tokens at which a server ends an answer, from the model's generation settings; EOS is another.

    Raises:
        DataError: the tokenizer has no Rust backend, or lacks a required end-of-sequence token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        train_on: TrainOn,
        max_length: int,
        on_too_long: OnTooLong,
        chunk_overlap: int = 0,
        template_arguments: Mapping[str, Any] | None = None,
        tool_format: str = "plain",
        stops: Collection[int] = (),
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError("the tokenizer has no fast (Rust) version", where="model.name")
        self._tokenizer = tokenizer
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._train_on = train_on
        self._max_length = max_length
        self._on_too_long = on_too_long
        self._overlap = chunk_overlap
        self._template_arguments, self._tool_format = template_arguments, tool_format
        # Prepended to every text by the tokenizer, for models that need it.
        bos = tokenizer.bos_token_id
        starts_with_bos = bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos]
        self._bos = (int(bos),) if starts_with_bos else ()
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._names = {number: str(added[number].content) for number in self._special_ids}
        self._stops = [self._names[number] for number in {*stops, tokenizer.eos_token_id} if number in self._names]
        self._special_texts = sorted(str(added[number].content) for number in self._special_ids)
        # The first characters tell most texts apart in a fraction of the time of the expression.
        self._begins = tuple({text[0] for text in self._special_texts if text})
        self._any_special = re.compile("|".join(map(re.escape, filter(None, self._special_texts))) or r"(?!)")
        self._tails: dict[str, list[int]] = {}
        # Truncation is a setting of the tokenizer: a thread that begins to tokenize meanwhile would truncate, too.
        self._lock = threading.Lock()
        self._has_types = "token_type_ids" in tokenizer.model_input_names

    @property
    def doubles(self) -> tuple[int, int, Mapping[int, str]]:
        """Ids of BOS and EOS, -1 if there is none, and all special tokens by id: for finding those that occur twice."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        return -1 if bos is None else int(bos), -1 if eos is None else int(eos), self._names

    @property
    def bos_text(self) -> str:
        """The text that the tokenizer itself prepends to every text; usually empty."""
        return str(self._tokenizer.bos_token) if self._bos else ""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def renderer(self) -> ChatRenderer:
        """The chat renderer, created for the first conversation, so that plain text needs no template."""
        return ChatRenderer(
            self._tokenizer,
            special_tokens=self._special_texts,
            stops=self._stops,
            arguments=self._template_arguments,
            tool_format=self._tool_format,
        )

    @cached_property
    def _widths(self) -> Widths | None:
        return Widths.of(self._backend)

    @cached_property
    def _trims(self) -> bool:
        """Whether offsets exclude the spaces of a token."""
        offsets = self._backend.encode("a  b", add_special_tokens=False).offsets
        return bool(sum(stop - start for start, stop in offsets) < len("a  b"))

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Tokenize a batch: :meth:`texts`, :meth:`tokenize` and :meth:`rows`.
        Raises DataError: an example cannot be tokenized; ``where`` is left to the caller, who knows file and row."""
        texts = self.texts(examples)
        return self.rows(texts, self.tokenize(texts))

    def texts(self, examples: Sequence[Example]) -> Texts:
        """What a batch has to tokenize. Raises DataError: as :meth:`encode`."""
        planned = [self._jobs(example) for example in examples]
        jobs = [job for jobs_of, _ in planned for job in jobs_of]
        without_offsets = not any(job.has_borders for job in jobs) or (
            len(jobs) >= _MANY_TEXTS and self._widths is not None
        )
        return Texts(examples, planned, jobs, without_offsets)

    def tokenize(self, texts: Texts) -> tuple[list[Any], list[Any]]:
        """Tokenize by the Rust library, in any thread: it lets other threads run Python meanwhile.

        Returns:
            Encodings of the jobs, and of the labelled texts.

        Raises:
            DataError: as :meth:`encode`.
        """
        encode_batch = self._backend.encode_batch_fast if texts.without_offsets else self._backend.encode_batch
        labelled = [
            example.text if example.text_pair is None else (example.text, example.text_pair)
            for example in texts.examples
            if isinstance(example, Labelled)
        ]
        try:
            with self._lock:
                encodings = encode_batch([job.text for job in texts.jobs], add_special_tokens=False)
                # With the special tokens that classifiers are trained with, such as [CLS] and [SEP].
                return encodings, self._backend.encode_batch_fast(labelled) if labelled else []
        except (TypeError, UnicodeEncodeError):
            raise DataError(
                "the text holds half of a surrogate pair, which is not a valid character",
                repair="write the row again from clean text",
            ) from None

    def rows(self, texts: Texts, encodings: tuple[list[Any], list[Any]]) -> list[Encoded]:
        """The result for each example of a batch. Raises DataError: as :meth:`encode`."""
        encoded, uncut = encodings[0], iter(encodings[1])
        ids = [encoding.ids for encoding in encoded]
        unknown = [None] * len(ids)
        spans = self._spans_by_width(texts.jobs, ids) if texts.without_offsets else unknown
        tokens = map(self._tokens, texts.jobs, ids, spans, unknown if texts.without_offsets else encoded)
        results = []
        for example, (jobs, notes) in zip(texts.examples, texts.planned, strict=True):
            rows = list(islice(tokens, len(jobs)))
            match example:
                case Labelled():
                    results.append(self._labelled(example, next(uncut), notes))
                case Preference():
                    results.append(self._pair(example, jobs, rows, notes))
                case Unpaired():
                    rows = [replace(row, values={"label": float(example.is_wanted)}) for row in rows]
                    results.append(self._encoded(rows, notes, chunked=False))
                case _:
                    results.append(self._encoded(rows, notes, isinstance(example, Text)))
        return results

    # --- what to tokenize -------------------------------------------------------------------------------------------

    def _jobs(self, example: Example) -> tuple[list[_Job], frozenset[str]]:
        jobs, notes = self._jobs_of(example)
        if example.notes:
            notes |= example.notes
        return jobs, notes | {"special_in_prompts"} if self._has_special(example) else notes

    def _has_special(self, example: Example) -> bool:
        """Whether text that is not learned would be read as special tokens."""
        if isinstance(example, Preference | Unpaired):
            example = example.chosen if isinstance(example, Preference) else example.answer
        if isinstance(example, Chat):
            texts = [
                message.content for message in example.messages if message.role != "assistant" or not message.train
            ]
        elif isinstance(example, Labelled):
            texts = [example.text, example.text_pair or ""]
        else:
            texts = [example.prompt] if isinstance(example, Completion) and self._train_on != "all" else []
        for text in texts:
            for begin in self._begins:
                if begin in text and self._any_special.search(text) is not None:
                    return True
        return False

    def _jobs_of(self, example: Example, train_on: TrainOn | None = None) -> tuple[list[_Job], frozenset[str]]:
        train_on = train_on or self._train_on
        if isinstance(example, Preference | Unpaired):
            answers = (example.chosen, example.rejected) if isinstance(example, Preference) else (example.answer,)
            # Whatever `data.train_on` says: the prompt is no answer.
            each = [self._jobs_of(answer, "completion") for answer in answers]
            if any(len(jobs) != 1 for jobs, _ in each):
                raise DataError(
                    "the chat template renders earlier turns of this answer differently when a later one follows, so "
                    "that it is no single row",
                    where="model.chat_template",
                    repair="end the answer after its first turn, or set data.on_bad_row to drop",
                )
            # A row ends with its answer: some heads read the last token.
            ended = [replace(job, text=job.text[: job.spans[-1][1]]) if job.spans else job for (job,), _ in each]
            return ended, frozenset[str]().union(*(notes for _, notes in each))
        if isinstance(example, Text):
            return [_Job(example.text, ((0, len(example.text)),), self._bos, self._eos())], frozenset()
        if isinstance(example, Labelled):
            return [], frozenset()
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            start = 0 if train_on == "all" else len(example.prompt)
            notes = frozenset() if example.completion.strip() else frozenset({"empty_answers"})
            notes |= {"joined_words"} if _joins_words(example.prompt, example.completion) else set()
            return [_Job(text, ((start, len(text)),), self._bos, self._eos())], notes
        if train_on == "all":
            (row,), notes = self.renderer.whole(example)
            suffix = () if self.renderer.ends_turn(row.text) or not example.messages[-1].train else self._eos()
            return [_Job(row.text, row.spans, suffix=suffix)], notes
        rows, notes = self.renderer.rows(example, self._learned(example, train_on))
        jobs = []
        for row in rows:
            # A final answer that no end-of-turn token closes.
            needs_end = bool(row.spans) and not row.ends[-1] and not row.text[row.spans[-1][1] :].strip()
            text = row.text[: row.spans[-1][1]] if needs_end else row.text
            jobs.append(_Job(text, row.spans, suffix=self._eos() if needs_end else ()))
        return jobs, notes

    def _learned(self, chat: Chat, train_on: TrainOn) -> list[int]:
        """Indices of the messages to learn."""
        assistants = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if train_on == "last_assistant":
            assistants = assistants[-1:]
        elif train_on == "completion":
            assistants = [index for index in assistants if index >= chat.prompt_messages]
        return [index for index in assistants if chat.messages[index].train]

    def _eos(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model cannot learn to stop",
                where="model.name",
                repair="use a tokenizer with an eos_token; a classifier needs none: model.task=sequence_classification",
            )
        return (int(eos),)

    # --- from encodings to rows -------------------------------------------------------------------------------------

    def _encoded(self, wholes: list[Tokens], notes: frozenset[str], chunked: bool) -> Encoded:
        rows: list[Tokens] = []
        dropped = dropped_tokens = cut = lost = 0
        for whole in wholes:
            pieces = self._fit(whole, chunked=chunked)
            dropped += not pieces
            dropped_tokens += 0 if pieces else len(whole.ids)
            cut += sum(len(whole.ids) - len(piece.ids) for piece in pieces if piece.truncated)
            # Most rows fit.
            if pieces and pieces[0] is not whole:
                lost += bool(whole.supervised) and not any(piece.supervised for piece in pieces)
            rows += pieces
        return Encoded(rows, notes, dropped, dropped_tokens, cut, lost)

    def _pair(self, example: Preference, jobs: list[_Job], rows: list[Tokens], notes: frozenset[str]) -> Encoded:
        """The rows of the better and of the worse answer, which begin with the same tokens up to the answers."""
        if _prompt_of(rows[0]) != _prompt_of(rows[1]):
            # A token of one of them reaches over the end of the prompt: a server tokenizes that alone.
            rows = [self._tokens(job, *self._apart(job), None) for job in jobs]
            if _prompt_of(rows[0]) != _prompt_of(rows[1]):
                raise DataError(
                    "the prompt of the two answers has different tokens",
                    repair="end the prompt with a newline, or set data.on_bad_row to drop",
                )
        values = {} if example.margin is None else {"margin": example.margin}
        encoded = self._encoded([replace(row, values=values) for row in rows], notes, chunked=False)
        if len(encoded.rows) < len(rows):
            # One of them is too long: the other alone is no pair.
            return Encoded([], notes, dropped=1, dropped_tokens=sum(len(row.ids) for row in rows))
        return replace(encoded, answers_lost=min(1, encoded.answers_lost), together=True)

    def _labelled(self, example: Labelled, encoding: Any, notes: frozenset[str]) -> Encoded:
        ids, types = encoding.ids, encoding.type_ids
        excess = max(0, len(ids) - self._max_length)
        if excess:
            if not self._fit(Tokens(ids, ()), chunked=False):
                return Encoded([], notes, dropped=1, dropped_tokens=len(ids))
            # The longer one of two texts is truncated first; special tokens stay.
            with self._lock:
                cut = self._tokenizer(example.text, example.text_pair, truncation=True, max_length=self._max_length)
                self._backend.no_truncation()
            ids, types = cut["input_ids"], cut.get("token_type_ids", ())
        if not ids:
            raise DataError("the text has no tokens", repair="fill or remove the row, or set data.on_bad_row to drop")
        row = Tokens(
            list(ids),
            (),
            truncated=excess > 0,
            label=example.label,
            token_types=tuple(types) if self._has_types else (),
        )
        return Encoded([row], notes, truncated_tokens=excess)

    def _tokens(self, job: _Job, ids: list[int], spans: list[Span] | None, encoding: Any) -> Tokens:
        """The row of a job; if the spans are not known yet, from the encoding, or from a new one with offsets."""
        if spans is None:
            encoding = encoding or self._backend.encode(job.text, add_special_tokens=False)
            spans = _token_spans(encoding, job, self._special_ids)
            if spans is None or any(
                self._differs_alone(job.text, start, ids, encoding.char_to_token) for start, _ in job.spans
            ):
                ids, spans = self._apart(job)
        before, end = len(job.prefix), len(job.prefix) + len(ids)
        spans = [(start + before, stop + before) for start, stop in spans]
        if job.suffix:
            ids = [*job.prefix, *ids, *job.suffix]
            if spans and spans[-1][1] == end:
                spans[-1] = (spans[-1][0], len(ids))
            else:
                spans.append((end, len(ids)))
        elif job.prefix:
            ids = [*job.prefix, *ids]
        return Tokens(ids, tuple(spans))

    def _apart(self, job: _Job) -> tuple[list[int], list[Span]]:
        """Tokenize separately at the borders of trained spans, so that no token straddles one."""
        borders = [0, *(border for span in job.spans for border in span), len(job.text)]
        pieces = [job.text[start:stop] for start, stop in pairwise(borders)]
        encoded = self._backend.encode_batch(pieces, add_special_tokens=False)
        ids: list[int] = []
        spans: list[Span] = []
        for index, piece in enumerate(encoded):
            if index % 2:
                spans.append((len(ids), len(ids) + len(piece.ids)))
            ids += piece.ids
        if self._decode(ids) != self._decode(self._backend.encode(job.text, add_special_tokens=False).ids):
            raise DataError(
                "one token spans the end of the prompt and the start of the answer, and this tokenizer cannot split it",
                repair="end the prompt with a newline, or move the space between them to one side",
            )
        return ids, spans

    def _spans_by_width(self, jobs: Sequence[_Job], ids: Sequence[list[int]]) -> list[list[Span] | None]:
        """As :func:`_token_spans`, of each job; None if that needs offsets, or if a text must be cut at a border."""
        spans_by_text: list[list[Span] | None] = [
            None if job.has_borders else [(0, len(tokens)) for start, stop in job.spans if start < stop]
            for job, tokens in zip(jobs, ids, strict=True)
        ]
        bordered = [at for at, spans in enumerate(spans_by_text) if spans is None]
        if self._widths is None or not bordered:
            return spans_by_text
        characters = []
        for job in (jobs[at] for at in bordered):
            runs = [start - _run_before(job.text, start) for start, _ in job.spans]
            characters.append([*runs, *(border for span in job.spans for border in span)])
        every = self._widths.places([jobs[at].text for at in bordered], [ids[at] for at in bordered], characters)
        for at, places in zip(bordered, every, strict=True):
            if places is not None:
                spans_by_text[at] = self._spans_at(jobs[at], ids[at], places)
        return spans_by_text

    def _spans_at(self, job: _Job, ids: list[int], places: Places) -> list[Span] | None:
        text, spans = job.text, []
        for start, stop in job.spans:
            if start < len(text) and (run := _run_before(text, start)):
                if self._trims and " " in text[start - run : start + 1]:
                    return None
                if self._differs_alone(text, start, ids, lambda character: places[character][0]):
                    return None
            if start < stop:
                (first, is_border), (last, is_border_too) = places[start], places[stop]
                if not (is_border and is_border_too):
                    return None
                spans.append((first, last))
        return spans

    def _differs_alone(self, text: str, start: int, ids: Sequence[int], token_at: Callable[[int], int | None]) -> bool:
        """Whether the end of a prompt is tokenized differently when nothing follows, as in serving.

        The rules by which tokenizers pre-split text only look ahead in runs of white space; so the tokens of that run
        are compared with those of the same run at the end of a text.
        """
        run = _run_before(text, start)
        if not run:
            return False
        tail = text[max(0, start - run - _TAIL) : start]
        special = max((tail.rfind(token) for token in self._special_texts), default=-1)
        tail = tail[max(special, 0) :]
        if tail not in self._tails:
            alone = self._backend.encode(tail, add_special_tokens=False)
            begin = alone.char_to_token(len(tail) - run)
            if len(self._tails) > _MOST_TAILS:
                self._tails.clear()
            self._tails[tail] = alone.ids[begin:] if begin is not None else []
        low, high = token_at(start - run), token_at(start)
        return low is not None and high is not None and ids[low:high] != self._tails[tail]

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _fit(self, row: Tokens, *, chunked: bool) -> list[Tokens]:
        limit = self._max_length
        length = len(row.ids)
        if length <= limit:
            return [row]
        if chunked:
            step = limit - self._overlap
            starts = list(range(0, max(length - self._overlap, 1), step))
            if length - starts[-1] == 1:
                # The first token of a piece has nothing before it to be predicted from.
                starts[-1] -= 1
            stops = [min(start + limit, length) for start in starts]
            if not self._overlap:
                stops[:-1] = starts[1:]
            pieces = []
            for start, stop in zip(starts, stops, strict=True):
                # The overlap with the previous piece is context, and not trained on twice.
                learned_from = start + self._overlap if start else 0
                spans = [(max(low, learned_from) - start, min(high, stop) - start) for low, high in row.spans]
                pieces.append(Tokens(row.ids[start:stop], tuple((low, high) for low, high in spans if low < high)))
            return pieces
        if self._on_too_long == "drop":
            return []
        if self._on_too_long == "error":
            raise DataError(
                f"the row has {length} tokens, but data.max_length is {limit}",
                repair="raise data.max_length, or set data.on_too_long to truncate or drop",
            )
        kept = tuple((start, min(stop, limit)) for start, stop in row.spans if start < limit)
        return [replace(row, ids=row.ids[:limit], spans=kept, truncated=True)]


def _prompt_of(row: Tokens) -> list[int]:
    """The tokens before the first that is learned."""
    return row.ids[: row.spans[0][0]] if row.spans else row.ids


def _run_before(text: str, start: int) -> int:
    """Length of the white space at the end of a prompt; 0 if it is less than two characters, or the whole prompt."""
    if start < 2 or not text[start - 2 : start].isspace():
        return 0
    run = start - len(text[:start].rstrip())
    return run if run < start else 0


def _joins_words(before: str, after: str) -> bool:
    """Whether a word would continue across the border, in a script with white space between words."""
    if not before or before[-1].isspace() or not after[:1].isalnum():
        return False
    return unicodedata.east_asian_width(before[-1]) not in "WF" and unicodedata.east_asian_width(after[0]) not in "WF"


def _token_spans(encoding: Any, job: _Job, special: Collection[int]) -> list[Span] | None:
    """Token ranges of the trained characters; None if a token straddles a border and the text must be cut there.

    A special token that absorbs adjacent white space belongs to the side on which it begins.
    """
    spans = []
    for start, stop in job.spans:
        if start == stop:
            continue
        # Look-ups in Rust: a Python list of all offsets costs up to a quarter of tokenizing.
        first = 0 if start == 0 else encoding.char_to_token(start)
        last = len(encoding) if stop >= len(job.text) else encoding.char_to_token(stop)
        if first is None or last is None:
            # A border character without a token: white space that the tokenizer drops.
            ends = [end for _, end in encoding.offsets]
            first, last = bisect_right(ends, start), bisect_right(ends, stop)
        if start and first < len(encoding) and encoding.token_to_chars(first)[0] < start:
            if encoding.ids[first] not in special:
                return None
            first += 1
        if stop < len(job.text) and last < len(encoding) and encoding.token_to_chars(last)[0] < stop:
            if encoding.ids[last] not in special:
                return None
            last += 1
        spans.append((first, last))
    return spans
