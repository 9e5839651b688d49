"""The engine that is always there: a model of Transformers, and LoRA with the arithmetic that trained it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

import torch
import transformers

from finray import compat
from finray.evaluation.engines.base import (
    Answer,
    Continuation,
    Likelihood,
    Loading,
    OnToken,
    check_prompts,
)
from finray.evaluation.engines.sampling import Sampling
from finray.models.artifacts import load_artifact


class TransformersEngine:
    """See :class:`finray.evaluation.engines.base.Engine`."""

    name = "transformers"

    def __init__(self, loading: Loading) -> None:
        model = load_artifact(loading.artifact, dtype=loading.dtype)
        if loading.merge and loading.artifact.is_adapter:
            model = model.merge_and_unload()
        self._take(model.to(loading.device), loading.tokenizer, loading.batch_size)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, batch_size: int = 32) -> TransformersEngine:
        """Around a Transformers or PEFT causal language model in evaluation mode, on its device."""
        engine = cls.__new__(cls)
        engine._take(model, tokenizer, batch_size)
        return engine

    def _take(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model, self.tokenizer, self._batch_size = model, tokenizer, batch_size
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.max_length: int | None = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        # A chat model ends its turns with a token of its generation config, which need not be the tokenizer's EOS.
        configured = model.generation_config.eos_token_id
        ends = configured if isinstance(configured, list | tuple) else [configured]
        self._ends = sorted({int(token) for token in (tokenizer.eos_token_id, *ends) if token is not None})
        self._has_state = compat.carries_state(inner)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        adapter: bool = True,
        on_token: OnToken | None = None,
    ) -> Iterator[Answer]:
        """Answers in the order in which they are finished, those to long prompts first."""
        rows = range(len(prompts)) if rows is None else rows
        check_prompts(prompts, rows, self.max_length)
        by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        with torch.no_grad(), self._with(adapter):
            while by_length:
                size = self._batch_size
                if self._has_state:  # Padding would change the state.
                    longest = len(prompts[by_length[0]])
                    size = min(size, sum(len(prompts[index]) == longest for index in by_length))
                batch, by_length = by_length[:size], by_length[size:]
                yield from self._batch(
                    [prompts[index] for index in batch], [rows[index] for index in batch], sampling, on_token
                )

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods, one forward pass each."""
        check_prompts([row.context for row in rows], range(len(rows)), None)
        with torch.no_grad(), self._with(adapter):
            for number, row in enumerate(rows):
                ids = torch.tensor([[*row.context, *row.tokens]], device=self.model.device)
                logits = self.model(ids).logits[0, len(row.context) - 1 : -1].float()
                targets = torch.tensor(list(row.tokens), dtype=torch.int64, device=self.model.device)
                chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
                yield Likelihood(number, tuple(chosen.tolist()), bool((logits.argmax(-1) == targets).all()))

    def close(self) -> None:
        """Nothing is held but memory."""

    def _with(self, adapter: bool) -> AbstractContextManager[Any]:
        return nullcontext() if adapter or not hasattr(self.model, "disable_adapter") else self.model.disable_adapter()

    def _batch(
        self, prompts: list[Sequence[int]], rows: list[int], sampling: Sampling, on_token: OnToken | None
    ) -> Iterator[Answer]:
        """Answers of a batch, padded on the left, by Transformers' own ``generate``."""
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        tokens_BT = torch.full((len(prompts), longest), pad, dtype=torch.int64)
        mask_BT = torch.zeros_like(tokens_BT)
        for number, prompt in enumerate(prompts):
            tokens_BT[number, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask_BT[number, longest - len(prompt) :] = 1
        room = (
            sampling.max_new_tokens
            if self.max_length is None
            else min(sampling.max_new_tokens, self.max_length - longest)
        )
        output = self.model.generate(
            input_ids=tokens_BT.to(self.model.device),
            attention_mask=mask_BT.to(self.model.device),
            max_new_tokens=room,
            pad_token_id=pad,
            eos_token_id=self._ends or None,
            use_cache=True,
            # None for what greedy search ignores: a model's generation config may set it, and Transformers then warns.
            **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
            logits_processor=[_Choose(sampling, rows)] if sampling.temperature else None,
        )
        for number, row in enumerate(rows):
            said = list(takewhile(lambda token: token not in self._ends, output[number, longest:].tolist()))
            ended = len(said) < room
            text = str(self.tokenizer.decode(said, skip_special_tokens=True))
            if on_token is not None:
                for token in said:
                    on_token(row, token)
            yield Answer(row, tuple(said), text, "stop" if ended else "length")


class _Choose(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves one token to greedy search: the one that is sampled for the row."""

    def __init__(self, sampling: Sampling, rows: list[int]) -> None:
        self._sampling, self._rows, self._step = sampling, rows, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        chosen_B = self._sampling.choose(scores, self._rows, [self._step] * len(self._rows))
        self._step += 1
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B[:, None], 0.0)
