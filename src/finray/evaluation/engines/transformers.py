"""finray's own engine, always available: Transformers models, and LoRA with the arithmetic of training.

If rows of a model may be packed (:mod:`finray.models.packing_check`), a fixed set of slots holds the running rows. Each
step is one forward pass: a token for each of them, and the whole prompt of rows that replace finished ones. Answers
equal those of Transformers' greedy ``generate``. Other models use ``generate`` itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, TypeVar

import torch
import transformers

from finray import compat
from finray.data.dataset.prepared import PreparedSplit
from finray.evaluation.engines.base import (
    Answer,
    Continuation,
    Ids,
    Likelihood,
    Loading,
    Numbers,
    OnToken,
    check_adapter,
    check_continuations,
    check_prompts,
    mute,
)
from finray.evaluation.engines.sampling import NO_TOKEN, Sampling, end_tokens, not_finite
from finray.models import attention
from finray.models.artifacts import load_artifact, merge_adapter
from finray.models.head import chunk_rows
from finray.models.packed import PackedModel
from finray.models.packing_cache import packing_of_config
from finray.models.reordered import reorder
from finray.models.ropes import FIXED, RowRopes, rope_types
from finray.models.saved_layout import without_adapter
from finray.models.slots import Branches, Laid, Prefill, Slots, Step
from finray.models.towers import text_model
from finray.tasks.causal_lm import CausalLM

# Maximum tokens of prompts or scored rows in one forward pass, unless a single row has more.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
# Prompts share the cache of a common prefix of at least so many tokens.
_SHARED_FROM = 8
# Large passes of scored rows on a CPU have a multiple of so many tokens and logits.
SAME_TOKENS = 64
# Settings of a generation config that affect greedy search, each with the values that have no effect.
_ASKS = {
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"), (None,)),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), (None, 1.0)),
    **dict.fromkeys(("remove_invalid_values", "penalty_alpha", "watermarking_config"), (None, False)),
}


@dataclass(slots=True)
class RunningRow:
    """A running row.

    Attributes:
        number: of its prompt.
        prompt: token ids.
        room: maximum tokens of its answer.
        sampling: sampling settings.
        ends: tokens that end its answer.
        output_ids: tokens of the answer so far.
        logprobs: of these, and of the end token, if asked for.
        weights: version of the weights.
        is_done: whether it is finished.
    """

    number: int
    prompt: list[int]
    room: int
    sampling: Sampling
    ends: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: int = 0
    is_done: bool = False

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.output_ids)


AnyRow = TypeVar("AnyRow", bound=RunningRow)


def take(row: RunningRow, token: int, tokenizer: Any, on_token: OnToken) -> Answer | None:
    """Append the next token to a row; returns the answer if that ends it. Raises ModelError: there is no next token."""
    if token == NO_TOKEN:
        raise not_finite(f"prompt {row.number + 1} has no answer")
    sampling = row.sampling
    finish: Literal["stop", "length"] | None = None
    if token in row.ends:
        finish = "stop"
    else:
        row.output_ids.append(token)
        on_token(row.number, token)
        if sampling.stop:
            # A new occurrence of an n-byte string is within the last n tokens.
            recent = row.output_ids[-max(len(word.encode()) for word in sampling.stop) - 4 :]
            text = str(tokenizer.decode(recent, skip_special_tokens=True))
            finish = "stop" if any(word in text for word in sampling.stop) else None
        if finish is None and len(row.output_ids) == row.room:
            finish = "length"
    if finish is None:
        return None
    row.is_done = True
    text = str(tokenizer.decode(row.output_ids, skip_special_tokens=True))
    end = token if token in row.ends else None
    known = tuple(row.logprobs), row.weights
    return Answer(row.number, tuple(row.output_ids), sampling.cut(text), finish, end, *known)


class TransformersEngine:
    """See :class:`finray.evaluation.engines.base.Engine`."""

    name = "transformers"

    def __init__(self, loading: Loading) -> None:
        model = load_artifact(loading.artifact, dtype=loading.dtype).to(loading.device)
        self._is_merged = loading.merge and loading.artifact.is_adapter
        if self._is_merged:
            model = merge_adapter(model)
        reorder(model)
        self._hold(model, loading.tokenizer, loading.batch_size, loading.notify)

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, *, batch_size: int = 32, notify: Callable[[str], None] = lambda line: None
    ) -> TransformersEngine:
        """Around a Transformers or PEFT causal language model in evaluation mode, on its device.

        Until :meth:`close` the model has finray's attention, and cannot be called in any other way.
        """
        engine = cls.__new__(cls)
        engine._is_merged = False
        engine._hold(model, tokenizer, batch_size, notify)
        return engine

    def _hold(self, model: Any, tokenizer: Any, batch_size: int, notify: Callable[[str], None]) -> None:
        self.model, self.tokenizer, self._batch_size = model, tokenizer, batch_size
        self.weights = 0
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._inner = without_adapter(model)
        config, generation = self._inner.config.get_text_config(), self._inner.generation_config
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.vocabulary = int(self._inner.get_input_embeddings().weight.shape[0])
        self._ends = end_tokens(tokenizer, generation)
        self._penalty = float(generation.repetition_penalty or 1.0)
        packing = packing_of_config(config)
        reason = "it carries a state from token to token" if packing.has_states else packing.reason
        reason = "its attention is its own" if packing.by_row else reason
        self._pads = packing.pads
        # A row's keys then belong to its own length: none can be shared with a row of another.
        self._shares = set(rope_types(config)) <= set(FIXED)
        # The last token of a row is read where the row's length counts.
        self._read = -1 if self._shares else None
        self._turn = None if self._shares else compat.recomputes_cache_at(self._inner)
        RowRopes(self._inner)
        unusual = [name for name, nothing in _ASKS.items() if getattr(generation, name, None) not in nothing]
        if unusual and not reason:
            reason = f"its generation config sets {', '.join(unusual)}"
        self._packed: PackedModel | None = None
        self._kept: tuple[Slots, list[int], bool] | None = None
        if reason:
            notify(f"{packing.family} uses Transformers' generate, which is slower: {reason}")
            return
        attention.register()
        self._usual = compat.attention_implementation(text_model(self._inner))
        text_model(self._inner).set_attn_implementation(attention.NAME)
        precision = "fp32" if self._inner.dtype == torch.float32 else "bf16"
        self._packed = PackedModel(model, precision=precision, attention_name=attention.NAME, device=model.device)

    def generate(
        self,
        prompts: Ids,
        sampling: Sampling,
        *,
        rows: Numbers = (),
        adapter: bool = True,
        on_token: OnToken = mute,
        logprobs: bool = False,
    ) -> Iterator[Answer]:
        """Answers in the order in which they finish; long prompts come first.

        A prefix that all prompts have in common, such as a system prompt, is computed once. The KV cache of a single
        prompt is kept: a common prefix with the next one is not computed again.
        """
        numbers = rows or range(len(prompts))
        check_prompts(prompts, numbers, self.max_length, self.vocabulary)
        limit = sampling.max_new_tokens
        rooms = [limit if self.max_length is None else min(limit, self.max_length - len(prompt)) for prompt in prompts]
        waiting = [
            RunningRow(number, list(prompt), room, sampling, self._ends, weights=self.weights)
            for number, prompt, room in zip(numbers, prompts, rooms, strict=True)
        ]
        waiting.sort(key=lambda row: -len(row.prompt))
        answers = self.in_batches if self._packed is None else self._in_slots
        return answers(waiting, sampling, adapter, on_token, logprobs)

    @property
    def has_slots(self) -> bool:
        """Whether rows share slots, and :meth:`step` works; else Transformers' own ``generate`` answers."""
        return self._packed is not None

    @torch.inference_mode()
    def _in_slots(
        self, rows: list[RunningRow], sampling: Sampling, adapter: bool, on_token: OnToken, logprobs: bool
    ) -> Iterator[Answer]:
        """Answers of rows that share slots; running rows are always in the first slots."""
        waiting, working, device = deque(rows), list[RunningRow](), self.model.device
        slots, cached = self._slots_for(rows, adapter)
        while waiting or working:
            coming, tokens = list[RunningRow](), 0
            while waiting and len(working) + len(coming) < slots.count:
                tokens += len(waiting[0].prompt) - cached
                if coming and tokens > PASS_TOKENS[device.type]:
                    break
                coming.append(waiting.popleft())
            with self._with(adapter):
                logits_BV = self.step(slots, working, coming, cached)
            working += coming
            if len(rows) == 1:
                self._kept = slots, [*rows[0].prompt, *rows[0].output_ids], adapter
            raw_BV = logits_BV.float().log_softmax(-1) if logprobs else None
            self.penalise(logits_BV, working)
            steps = [len(row.output_ids) for row in working]
            tokens_B = sampling.choose(logits_BV, [row.number for row in working], steps)
            _note(raw_BV, tokens_B, working)
            for row, token in zip(working, tokens_B.tolist(), strict=True):
                if (answer := take(row, token, self.tokenizer, on_token)) is not None:
                    yield answer
            close_gaps(slots, working)

    def step(
        self, slots: Slots, working: Sequence[RunningRow], coming: Sequence[RunningRow], known: int = 0
    ) -> torch.Tensor:
        """Logits (B, V) of the next token of each row: running rows, in the first slots, then new ones.

        Args:
            slots: KV cache of the rows.
            working: running rows, whose last token is read.
            coming: new rows, whose prompt is read into the slots after those.
            known: number of prompt tokens that are already in the slots.
        """
        device = self.model.device
        slots.reserve(max(row.length for row in (*working, *coming)))
        places = [row.length - 1 for row in working]
        pieces = [(row.output_ids[-1:], place) for row, place in zip(working, places, strict=True)]
        pieces += [(row.prompt[known:], known) for row in coming]
        prefills = [Prefill(len(working) + nth, known, len(row.prompt) - known) for nth, row in enumerate(coming)]
        again = self.anew(working)
        pieces += [([*working[slot].prompt, *working[slot].output_ids], 0) for slot in again]
        prefills += [Prefill(slot, 0, working[slot].length) for slot in again]
        laid = Laid.of(pieces, Step(slots, places, prefills, device), device)
        assert self._packed is not None
        last_B = laid.cu_seqlens[1:].long() - 1
        if again:
            count = len(working) + len(coming)
            last_B[again], last_B = last_B[count:].clone(), last_B[:count]
        if self._packed.has_plain_head(laid):
            return self._packed.head().logits(self._packed.hidden_TH(laid).index_select(0, last_B))
        return self._packed.logits_KV(laid, last_B)

    def anew(self, working: Sequence[RunningRow]) -> list[int]:
        """The running rows that a step reads as a whole: those that have become so long that Transformers' `generate`
        computes their cached keys anew."""
        return [slot for slot, row in enumerate(working) if row.length - 1 == self._turn]

    def _slots_for(self, rows: list[RunningRow], adapter: bool) -> tuple[Slots, int]:
        """Slots, and the number of prompt tokens in them already: the prefix that all prompts have in common, or that a
        single one has in common with the last one."""
        kept, self._kept = self._kept, None
        # The model must read at least one token to return logits.
        prompts = [row.prompt[:-1] for row in rows]
        if len(rows) == 1:
            if kept is None or kept[2] != adapter or not self._shares:
                return Slots(1), 0
            slots, tokens, _ = kept
            return slots, _common(tokens, prompts[0])
        slots = Slots(min(self._batch_size, len(rows)))
        # All others begin with what the first and the last in order begin with.
        cached = _common(min(prompts, default=[]), max(prompts, default=[]))
        if cached < _SHARED_FROM or not self._shares:
            return slots, 0
        with self._with(adapter):
            self.step(slots, [], [replace(rows[0], prompt=rows[0].prompt[:cached])])
        # A slot whose row is finished still begins with it.
        slots.share(cached)
        return slots, cached

    def penalise(self, logits_BV: torch.Tensor, rows: Sequence[RunningRow]) -> None:
        """Apply each row's repetition penalty to its logits, as Transformers' RepetitionPenaltyLogitsProcessor."""
        for logits_V, row in zip(logits_BV, rows, strict=True):
            if (penalty := self._penalty_of(row.sampling)) != 1.0:
                seen = torch.tensor(sorted({*row.prompt, *row.output_ids}), device=logits_V.device)
                logits = logits_V[seen]
                logits_V[seen] = torch.where(logits < 0, logits * penalty, logits / penalty)

    def _penalty_of(self, sampling: Sampling) -> float:
        """The repetition penalty that is asked for, else that of the model's generation config."""
        return self._penalty if sampling.repetition_penalty is None else float(sampling.repetition_penalty)

    @torch.inference_mode()
    def in_batches(
        self, rows: list[RunningRow], sampling: Sampling, adapter: bool, on_token: OnToken, logprobs: bool = False
    ) -> Iterator[Answer]:
        """Answers of left-padded batches, by Transformers' own ``generate``. It penalises repetition before finray sees
        a logit, so log-probabilities are those after it."""
        pad = self.tokenizer.pad_token_id
        pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        penalty = self._penalty_of(sampling)
        # Padding would count for the repetition penalty, and be a long row for the others.
        pads = self._pads and self._shares and penalty == 1.0
        while rows:
            longest = len(rows[0].prompt)
            fit = len(rows) if pads else sum(len(row.prompt) == longest for row in rows)
            if self.max_length is not None:
                # All rows of a batch go on until the last is finished, and a table of positions ends.
                fit = sum(longest + row.room <= self.max_length for row in rows[:fit])
            batch, rows = rows[: min(fit, self._batch_size)], rows[min(fit, self._batch_size) :]
            tokens_BT = torch.full((len(batch), longest), pad, dtype=torch.int64)
            mask_BT = torch.zeros_like(tokens_BT)
            for tokens_T, mask_T, row in zip(tokens_BT, mask_BT, batch, strict=True):
                tokens_T[longest - len(row.prompt) :] = torch.tensor(row.prompt)
                mask_T[longest - len(row.prompt) :] = 1
            driver = _Driver(self, batch, sampling, on_token, logprobs=logprobs)
            with self._with(adapter):
                self.model.generate(
                    input_ids=tokens_BT.to(self.model.device),
                    attention_mask=mask_BT.to(self.model.device),
                    max_new_tokens=max(row.room for row in batch),
                    pad_token_id=pad,
                    eos_token_id=None,
                    use_cache=True,
                    # Whose logits are those of several rows for each.
                    num_beams=1,
                    repetition_penalty=penalty,
                    logits_processor=[driver],
                    stopping_criteria=[_Done(batch)],
                    # None for settings that greedy search ignores: Transformers warns if a generation config sets them.
                    **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
                )
            yield from driver.answers

    @torch.inference_mode()
    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they finish; continuations of the same context share its computation."""
        check_continuations(rows, self.max_length, self.vocabulary)
        groups = dict[tuple[int, ...], list[int]]()
        for number, row in enumerate(rows):
            groups.setdefault(tuple(row.context), []).append(number)

        def size(group: tuple[tuple[int, ...], list[int]]) -> int:
            return len(group[0]) + sum(len(rows[number].tokens) - 1 for number in group[1])

        # Many rows may share a short context, as texts share their first token: their passes compute it anew. Those of
        # a long one stay together, because it costs more than they do.
        limit = PASS_TOKENS[self.model.device.type] if self._packed is not None else 0
        parts = list[tuple[tuple[int, ...], list[int]]]()
        for context, numbers in groups.items():
            part, tokens, most = list[int](), 0, max(limit - len(context), len(context))
            for number in numbers:
                more = len(rows[number].tokens) - 1
                if part and (tokens + more > most or not self._shares):
                    parts.append((context, part))
                    part, tokens = [], 0
                part.append(number)
                tokens += more
            parts.append((context, part))
        waiting = deque(sorted(parts, key=size, reverse=True))
        while waiting:
            batch = [waiting.popleft()]
            tokens = size(batch[0])
            while waiting and (tokens := tokens + size(waiting[0])) <= limit:
                batch.append(waiting.popleft())
            with self._with(adapter):
                likelihoods = self._score(rows, batch)
            yield from likelihoods

    def _score(self, rows: Sequence[Continuation], batch: list[tuple[tuple[int, ...], list[int]]]) -> list[Likelihood]:
        """Likelihoods for contexts with the indices of their continuations, in one forward pass."""
        numbers = [number for _, group in batch for number in group]
        device = self.model.device
        if self._packed is None:
            scored = []
            for number in numbers:
                context, tokens = rows[number].context, torch.tensor(list(rows[number].tokens), device=device)
                ids = torch.tensor([[*context, *rows[number].tokens[: self._read]]], device=device)
                logits_LV = self.model(ids, use_cache=False).logits[0, len(context) - 1 :][: len(tokens)]
                scored.append(_compare(logits_LV.float(), tokens))
        else:
            pieces, lengths = list[tuple[Sequence[int], int]](), list[tuple[int, list[int]]]()
            places, at = list[int](), 0
            for context, group in batch:
                # A single continuation shares a row with its context.
                alone = len(group) == 1
                pieces.append(([*context, *(rows[group[0]].tokens[: self._read] if alone else ())], 0))
                last, at = at + len(context) - 1, at + len(pieces[-1][0])
                branches = list[int]()
                for number in group:
                    fed, begin = rows[number].tokens[:-1], last + 1 if alone else at
                    places += [last, *range(begin, begin + len(fed))]
                    if fed and not alone:
                        pieces.append((fed, len(context)))
                        branches.append(len(fed))
                        at += len(fed)
                lengths.append((len(pieces[-1 - len(branches)][0]), branches))
            # On a CPU, oneDNN keeps its kernels for each number of tokens, and glibc's heap gets holes of each size.
            # Large passes are filled up so that few numbers occur: memory does not grow with the number of rows.
            unused = 0
            if device.type == "cpu" and at > 16 * SAME_TOKENS:
                if rest := -at % SAME_TOKENS:
                    pieces.append(([0] * rest, 0))
                    lengths.append((rest, []))
                unused = -len(places) % SAME_TOKENS
                places += [0] * unused
            laid = Laid.of(pieces, Branches(lengths), device)
            asked = [*(token for number in numbers for token in rows[number].tokens), *[0] * unused]
            tokens_K = torch.tensor(asked, device=device)
            places_K = torch.tensor(places, device=device)
            if self._packed.has_plain_head(laid):
                hidden_KH = self._packed.hidden_TH(laid).index_select(0, places_K)
                head = self._packed.head()
                chunk = chunk_rows(head.weight_VH.shape[0], device.type)
                parts = [
                    _compare(head.logits(hidden), tokens)
                    for hidden, tokens in zip(torch.split(hidden_KH, chunk), torch.split(tokens_K, chunk), strict=True)
                ]
            else:
                parts = [_compare(self._packed.logits_KV(laid, places_K).float(), tokens_K)]
            sizes = [*(len(rows[number].tokens) for number in numbers), unused]
            logprobs, greedy = (torch.split(torch.cat(column), sizes) for column in zip(*parts, strict=True))
            scored = list(zip(logprobs, greedy, strict=True))[: len(numbers)]
        return [
            Likelihood(number, tuple(logprobs.tolist()), bool(greedy.all()))
            for number, (logprobs, greedy) in zip(numbers, scored, strict=True)
        ]

    def close(self) -> None:
        """Restore the attention of a model that was passed in."""
        self._kept = None
        if self._packed is not None:
            text_model(self._inner).set_attn_implementation(self._usual)

    @torch.inference_mode()
    def sums_of(
        self, kind: type[CausalLM], split: PreparedSplit, rows: Sequence[int], *, adapter: bool = True
    ) -> Iterator[list[float]]:
        """The sums of a task's metrics over each row, as in an evaluation during training.

        Args:
            kind: of the task.
            split: that the rows are in.
            rows: their numbers.
            adapter: whether to apply the adapter.
        """
        name = None if self._packed is None else attention.NAME
        precision = "fp32" if self._inner.dtype == torch.float32 else "bf16"
        task = kind(self.model, precision=precision, attention_name=name, device=self.model.device)
        for row in rows:
            sums = torch.zeros(task.objective.metric_count(1), dtype=torch.float64, device=self.model.device)
            with self._with(adapter):
                batch = task.collate(split, [row]).to(self.model.device)
                task.objective.score(task.outputs(batch), batch, sums)
            yield sums.tolist()

    def _with(self, adapter: bool) -> AbstractContextManager[Any]:
        """Context manager of a forward pass with or without the adapter."""
        check_adapter(adapter, is_merged=self._is_merged)
        if adapter or self.model is self._inner:
            return nullcontext()
        without: AbstractContextManager[Any] = self.model.disable_adapter()
        return without


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = zip(first, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def close_gaps(slots: Slots, working: list[AnyRow]) -> None:
    """Drop finished rows, and move the last ones into their slots."""
    place = 0
    while place < len(working):
        if not working[place].is_done:
            place += 1
            continue
        last = working.pop()
        if place < len(working):
            working[place] = last
            if not last.is_done:
                slots.move(len(working), place, last.length - 1)


def _note(raw_BV: torch.Tensor | None, tokens_B: torch.Tensor, rows: Sequence[RunningRow]) -> None:
    """Note the log-probability of the token that each row takes, if they were asked for."""
    if raw_BV is not None:
        chosen_B = raw_BV.gather(1, tokens_B.clamp(min=0)[:, None])[:, 0]
        for row, logprob in zip(rows, chosen_B.tolist(), strict=True):
            if not row.is_done:
                row.logprobs.append(logprob)


def _compare(logits_KV: torch.Tensor, tokens_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token, and whether it is the most likely one."""
    chosen_K = logits_KV.gather(1, tokens_K[:, None])[:, 0]
    return chosen_K - logits_KV.logsumexp(-1), logits_KV.argmax(-1) == tokens_K


class _Driver(transformers.LogitsProcessor):  # type: ignore[misc]
    """Chooses tokens inside Transformers' ``generate``, by leaving its greedy search a single candidate."""

    def __init__(
        self,
        engine: TransformersEngine,
        rows: list[RunningRow],
        sampling: Sampling,
        on_token: OnToken,
        *,
        logprobs: bool,
    ) -> None:
        self.answers: list[Answer] = []
        self._logprobs = logprobs
        self._engine, self._rows, self._sampling, self._on_token = engine, rows, sampling, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        numbers, steps = [row.number for row in self._rows], [len(row.output_ids) for row in self._rows]
        chosen_B = self._sampling.choose(scores, numbers, steps)
        _note(scores.float().log_softmax(-1) if self._logprobs else None, chosen_B, self._rows)
        for row, token in zip(self._rows, chosen_B.tolist(), strict=True):
            if not row.is_done:
                answer = take(row, token, self._engine.tokenizer, self._on_token)
                self.answers += [] if answer is None else [answer]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B[:, None], 0.0)


class _Done(transformers.StoppingCriteria):  # type: ignore[misc]
    """Tells Transformers' ``generate`` which rows are finished."""

    def __init__(self, rows: list[RunningRow]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.tensor([row.is_done for row in self._rows], device=input_ids.device)
