"""The engine that is always there: models of Transformers, and LoRA with the arithmetic that trained it.

Where rows of a model may be laid end to end (:mod:`finray.models.packing_check`), a fixed set of slots holds the rows
at work. Each step is one forward pass: a token for each of them, and the whole prompt of rows that take the place of
those that are finished. Answers are those of Transformers' greedy ``generate``. Other models are given to that itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, TypeVar

import torch
import transformers

from finray import compat
from finray.errors import ModelError
from finray.evaluation.engines.base import (
    Answer,
    Continuation,
    Ids,
    Likelihood,
    Loading,
    Numbers,
    OnToken,
    check_continuations,
    check_prompts,
    mute,
)
from finray.evaluation.engines.sampling import Sampling, end_tokens
from finray.models import attention
from finray.models.artifacts import load_artifact
from finray.models.head import CHUNK_ELEMENTS, CHUNK_ROWS
from finray.models.packed import PackedModel
from finray.models.packing_check import check_packing_of
from finray.models.reordered import reorder
from finray.models.slots import Branches, Laid, Prefill, Slots, Step

# Tokens of prompts, and of rows that are scored, in one forward pass, unless a single row has more.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
# What else a generation config may ask of greedy search, each with the values that ask for nothing.
_ASKS = {
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"), (None,)),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("num_beams", "guidance_scale", "encoder_repetition_penalty"), (None, 1, 1.0)),
    **dict.fromkeys(("remove_invalid_values", "penalty_alpha", "watermarking_config"), (None, False)),
}


@dataclass(slots=True)
class Row:
    """A row at work.

    Attributes:
        number: of its prompt.
        prompt: token ids.
        room: tokens that its answer may have.
        sampling: how its tokens are chosen.
        ends: tokens that end its answer.
        said: tokens of the answer so far.
        is_done: whether it is finished.
    """

    number: int
    prompt: list[int]
    room: int
    sampling: Sampling
    ends: frozenset[int]
    said: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.said)


AnyRow = TypeVar("AnyRow", bound=Row)


def take(row: Row, token: int, tokenizer: Any, on_token: OnToken) -> Answer | None:
    """Give a row its next token; the answer, if that ends it."""
    sampling = row.sampling
    finish: Literal["stop", "length"] | None = None
    if token in row.ends:
        finish = "stop"
    else:
        row.said.append(token)
        on_token(row.number, token)
        if sampling.stop:
            # A string of n bytes is in the last n tokens, if it has just come.
            recent = row.said[-max(len(word.encode()) for word in sampling.stop) - 4 :]
            text = str(tokenizer.decode(recent, skip_special_tokens=True))
            finish = "stop" if any(word in text for word in sampling.stop) else None
        if finish is None and len(row.said) == row.room:
            finish = "length"
    if finish is None:
        return None
    row.is_done = True
    text = str(tokenizer.decode(row.said, skip_special_tokens=True))
    return Answer(row.number, tuple(row.said), sampling.cut(text), finish)


class TransformersEngine:
    """See :class:`finray.evaluation.engines.base.Engine`."""

    name = "transformers"

    def __init__(self, loading: Loading) -> None:
        model = load_artifact(loading.artifact, dtype=loading.dtype).to(loading.device)
        self._is_merged = loading.merge and loading.artifact.is_adapter
        if self._is_merged:
            model = model.merge_and_unload()
        reorder(model)
        self._hold(model, loading.tokenizer, loading.batch_size, loading.tell)

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, *, batch_size: int = 32, tell: Callable[[str], None] = lambda line: None
    ) -> TransformersEngine:
        """Around a Transformers or PEFT causal language model in evaluation mode, on its device.

        Until :meth:`close` the model has finray's attention, and cannot be called in another way.
        """
        engine = cls.__new__(cls)
        engine._is_merged = False
        engine._hold(model, tokenizer, batch_size, tell)
        return engine

    def _hold(self, model: Any, tokenizer: Any, batch_size: int, tell: Callable[[str], None]) -> None:
        self.model, self.tokenizer, self._batch_size = model, tokenizer, batch_size
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        config, generation = self._inner.config.get_text_config(), self._inner.generation_config
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._ends = end_tokens(tokenizer, generation)
        self._penalty = float(generation.repetition_penalty or 1.0)
        packing = check_packing_of(config)
        reason = packing.reason
        rope = getattr(config, "rope_parameters", None) or {}
        ropes = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
        if any(one.get("rope_type") in ("dynamic", "longrope") for one in ropes):
            reason = "its positions are encoded by the length of the longest row"
        asked = [name for name, nothing in _ASKS.items() if getattr(generation, name, None) not in nothing]
        if asked and not reason:
            reason = f"its generation config asks for {', '.join(asked)}"
        self._packed: PackedModel | None = None
        # What Transformers' generate pads would change a state, and be penalised as if it had been said.
        self._pads = not (compat.carries_state(self._inner) or self._penalty != 1.0)
        self._kept: tuple[Slots, list[int], bool] | None = None
        if reason:
            tell(f"{packing.family} is answered by Transformers' own generate, which is slower: {reason}")
            return
        attention.register()
        self._usual = compat.attention_implementation(self._inner)
        self._inner.set_attn_implementation(attention.NAME)
        precision = "fp32" if self._inner.dtype == torch.float32 else "bf16"
        self._packed = PackedModel(model, precision=precision, attention_name=attention.NAME, device=model.device)

    def generate(
        self, prompts: Ids, sampling: Sampling, *, rows: Numbers = (), adapter: bool = True, on_token: OnToken = mute
    ) -> Iterator[Answer]:
        """Answers in the order in which they are finished; long prompts come first.

        What is known of a single prompt is kept: of the next one, the beginning that both share is not computed again.
        """
        numbers = rows or range(len(prompts))
        check_prompts(prompts, numbers, self.max_length)
        limit = sampling.max_new_tokens
        rooms = [limit if self.max_length is None else min(limit, self.max_length - len(one)) for one in prompts]
        waiting = [
            Row(number, list(prompt), room, sampling, self._ends)
            for number, prompt, room in zip(numbers, prompts, rooms, strict=True)
        ]
        waiting.sort(key=lambda row: -len(row.prompt))
        answers = self.in_batches if self._packed is None else self._in_slots
        return answers(waiting, sampling, adapter, on_token)

    @property
    def has_slots(self) -> bool:
        """Whether rows take turns in slots, and :meth:`step` works; else Transformers' own ``generate`` answers."""
        return self._packed is not None

    @torch.inference_mode()
    def _in_slots(self, rows: list[Row], sampling: Sampling, adapter: bool, on_token: OnToken) -> Iterator[Answer]:
        """Answers of rows that take turns in slots; the rows at work are always in the first ones."""
        waiting, working, device = deque(rows), list[Row](), self.model.device
        slots, known = self._slots_for(rows, adapter)
        while waiting or working:
            coming, tokens = list[Row](), 0
            while waiting and len(working) + len(coming) < slots.count:
                tokens += len(waiting[0].prompt)
                if coming and tokens > PASS_TOKENS[device.type]:
                    break
                coming.append(waiting.popleft())
            with self._with(adapter):
                logits_BV = self.step(slots, working, coming, known)
            working += coming
            if len(rows) == 1:
                self._kept = slots, [*rows[0].prompt, *rows[0].said], adapter
            for row, token in zip(working, self._choose(logits_BV, working, sampling), strict=True):
                if (answer := take(row, token, self.tokenizer, on_token)) is not None:
                    yield answer
            close_gaps(slots, working)

    def step(self, slots: Slots, working: Sequence[Row], coming: Sequence[Row], known: int = 0) -> torch.Tensor:
        """Logits (B, V) of the next token of each row: those at work, which are in the first slots, then new ones.

        Args:
            slots: of the rows.
            working: rows whose last token is read.
            coming: rows whose prompt is read, into the slots behind those.
            known: tokens of the prompts that are in the slots already.
        """
        device = self.model.device
        slots.reserve(max(row.length for row in (*working, *coming)))
        places = [row.length - 1 for row in working]
        pieces = [(row.said[-1:], place) for row, place in zip(working, places, strict=True)]
        pieces += [(row.prompt[known:], known) for row in coming]
        prefills = [Prefill(len(working) + nth, known, len(row.prompt) - known) for nth, row in enumerate(coming)]
        return self._last_logits(Laid.of(pieces, Step(slots, places, prefills, device), device))

    def _slots_for(self, rows: list[Row], adapter: bool) -> tuple[Slots, int]:
        """Slots, and how many tokens of the prompts they know: of a single one after another, the common beginning."""
        kept, self._kept = self._kept, None
        if len(rows) != 1:
            return Slots(min(self._batch_size, len(rows))), 0
        if kept is None or kept[2] != adapter:
            return Slots(1), 0
        slots, tokens, _ = kept
        # At least one token is given to the model, whose logits are asked for.
        pairs = zip(tokens, rows[0].prompt[:-1], strict=False)
        return slots, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _last_logits(self, laid: Laid) -> torch.Tensor:
        """Logits (B, V) after the last token of each piece."""
        assert self._packed is not None
        last_B = laid.cu_seqlens[1:].long() - 1
        if self._packed.has_plain_head(laid):
            return self._packed.head().logits(self._packed.hidden_TH(laid).index_select(0, last_B))
        return self._packed.logits_KV(laid, last_B)

    def _choose(self, logits_BV: torch.Tensor, rows: list[Row], sampling: Sampling) -> list[int]:
        """The next token of each row."""
        self.penalise(logits_BV, rows)
        numbers, steps = [row.number for row in rows], [len(row.said) for row in rows]
        tokens: list[int] = sampling.choose(logits_BV, numbers, steps).tolist()
        return tokens

    def penalise(self, logits_BV: torch.Tensor, rows: Sequence[Row]) -> None:
        """Change logits as the repetition penalty of the model's generation config does."""
        if self._penalty != 1.0:
            # As Transformers' RepetitionPenaltyLogitsProcessor.
            for logits_V, row in zip(logits_BV, rows, strict=True):
                seen = torch.tensor(sorted({*row.prompt, *row.said}), device=logits_V.device)
                found = logits_V[seen]
                logits_V[seen] = torch.where(found < 0, found * self._penalty, found / self._penalty)

    @torch.inference_mode()
    def in_batches(self, rows: list[Row], sampling: Sampling, adapter: bool, on_token: OnToken) -> Iterator[Answer]:
        """Answers of batches, padded on the left, by Transformers' own ``generate``."""
        pad = self.tokenizer.pad_token_id
        pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        while rows:
            longest = len(rows[0].prompt)
            fit = len(rows) if self._pads else sum(len(row.prompt) == longest for row in rows)
            batch, rows = rows[: min(fit, self._batch_size)], rows[min(fit, self._batch_size) :]
            tokens_BT = torch.full((len(batch), longest), pad, dtype=torch.int64)
            mask_BT = torch.zeros_like(tokens_BT)
            for tokens_T, mask_T, row in zip(tokens_BT, mask_BT, batch, strict=True):
                tokens_T[longest - len(row.prompt) :] = torch.tensor(row.prompt)
                mask_T[longest - len(row.prompt) :] = 1
            driver = _Driver(self, batch, sampling, on_token)
            with self._with(adapter):
                self.model.generate(
                    input_ids=tokens_BT.to(self.model.device),
                    attention_mask=mask_BT.to(self.model.device),
                    max_new_tokens=max(row.room for row in batch),
                    pad_token_id=pad,
                    eos_token_id=None,
                    use_cache=True,
                    logits_processor=[driver],
                    stopping_criteria=[_Done(batch)],
                    # None for what greedy search ignores: a generation config may set it, and Transformers then warns.
                    **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
                )
            yield from driver.answers

    @torch.inference_mode()
    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they are known; continuations of one context share its computation."""
        check_continuations(rows, self.max_length)
        groups = dict[tuple[int, ...], list[int]]()
        for number, row in enumerate(rows):
            groups.setdefault(tuple(row.context), []).append(number)

        def size(group: tuple[tuple[int, ...], list[int]]) -> int:
            return len(group[0]) + sum(len(rows[number].tokens) - 1 for number in group[1])

        waiting = deque(sorted(groups.items(), key=size, reverse=True))
        limit = PASS_TOKENS[self.model.device.type] if self._packed is not None else 0
        while waiting:
            batch = [waiting.popleft()]
            tokens = size(batch[0])
            while waiting and (tokens := tokens + size(waiting[0])) <= limit:
                batch.append(waiting.popleft())
            with self._with(adapter):
                found = self._score(rows, batch)
            yield from found

    def _score(self, rows: Sequence[Continuation], batch: list[tuple[tuple[int, ...], list[int]]]) -> list[Likelihood]:
        """Likelihoods of contexts with the numbers of their continuations, in one forward pass."""
        numbers = [number for _, group in batch for number in group]
        device = self.model.device
        if self._packed is None:
            found = []
            for number in numbers:
                context, tokens = rows[number].context, torch.tensor(list(rows[number].tokens), device=device)
                ids = torch.tensor([[*context, *rows[number].tokens[:-1]]], device=device)
                found.append(_compare(self.model(ids, use_cache=False).logits[0, len(context) - 1 :].float(), tokens))
        else:
            pieces, lengths = list[tuple[Sequence[int], int]](), list[tuple[int, list[int]]]()
            places, at = list[int](), 0
            for context, group in batch:
                # A single continuation is one row with its context.
                alone = len(group) == 1
                pieces.append(([*context, *(rows[group[0]].tokens[:-1] if alone else ())], 0))
                last, at = at + len(context) - 1, at + len(pieces[-1][0])
                branches = list[int]()
                for number in group:
                    fed = rows[number].tokens[:-1]
                    places += [last, *range(last + 1 if alone else at, (last + 1 if alone else at) + len(fed))]
                    if fed and not alone:
                        pieces.append((fed, len(context)))
                        branches.append(len(fed))
                        at += len(fed)
                lengths.append((len(pieces[-1 - len(branches)][0]), branches))
            laid = Laid.of(pieces, Branches(lengths), device)
            tokens_K = torch.tensor([token for number in numbers for token in rows[number].tokens], device=device)
            places_K = torch.tensor(places, device=device)
            if self._packed.has_plain_head(laid):
                hidden_KH = self._packed.hidden_TH(laid).index_select(0, places_K)
                head = self._packed.head()
                chunk = max(CHUNK_ROWS, CHUNK_ELEMENTS // head.weight_VH.shape[0])
                parts = [
                    _compare(head.logits(hidden), tokens)
                    for hidden, tokens in zip(torch.split(hidden_KH, chunk), torch.split(tokens_K, chunk), strict=True)
                ]
            else:
                parts = [_compare(self._packed.logits_KV(laid, places_K).float(), tokens_K)]
            sizes = [len(rows[number].tokens) for number in numbers]
            logprobs, greedy = (torch.split(torch.cat(column), sizes) for column in zip(*parts, strict=True))
            found = list(zip(logprobs, greedy, strict=True))
        return [
            Likelihood(number, tuple(logprobs.tolist()), bool(greedy.all()))
            for number, (logprobs, greedy) in zip(numbers, found, strict=True)
        ]

    def close(self) -> None:
        """Give a model that was handed over its own attention back."""
        self._kept = None
        if self._packed is not None:
            self._inner.set_attn_implementation(self._usual)

    def _with(self, adapter: bool) -> AbstractContextManager[Any]:
        """The context of a forward pass with the adapter or without it."""
        if not adapter and self._is_merged:
            raise ModelError("the adapter is merged into the model, whose base cannot be asked any more")
        if adapter or self.model is self._inner:
            return nullcontext()
        without: AbstractContextManager[Any] = self.model.disable_adapter()
        return without


def close_gaps(slots: Slots, working: list[AnyRow]) -> None:
    """Drop the rows that are done, and let the last ones move into their slots."""
    place = 0
    while place < len(working):
        if not working[place].is_done:
            place += 1
        elif (last := working.pop()) and place < len(working):
            working[place] = last
            if not last.is_done:
                slots.move(len(working), place, last.length - 1)


def _compare(logits_KV: torch.Tensor, tokens_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token its logarithmic probability, and whether it is the likeliest one."""
    chosen_K = logits_KV.gather(1, tokens_K[:, None])[:, 0]
    return chosen_K - logits_KV.logsumexp(-1), logits_KV.argmax(-1) == tokens_K


class _Driver(transformers.LogitsProcessor):  # type: ignore[misc]
    """Chooses tokens inside of Transformers' ``generate``, which is left nothing but greedy search among one."""

    def __init__(self, engine: TransformersEngine, rows: list[Row], sampling: Sampling, on_token: OnToken) -> None:
        self.answers: list[Answer] = []
        self._engine, self._rows, self._sampling, self._on_token = engine, rows, sampling, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        numbers, steps = [row.number for row in self._rows], [len(row.said) for row in self._rows]
        chosen_B = self._sampling.choose(scores, numbers, steps)
        for row, token in zip(self._rows, chosen_B.tolist(), strict=True):
            if not row.is_done:
                answer = take(row, token, self._engine.tokenizer, self._on_token)
                self.answers += [] if answer is None else [answer]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B[:, None], 0.0)


class _Done(transformers.StoppingCriteria):  # type: ignore[misc]
    """Tells Transformers' ``generate`` which rows are finished."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.tensor([row.is_done for row in self._rows], device=input_ids.device)
