"""Transformers' own ``generate``: prompts in batches of similar length, padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch

from finray.evaluation.engines.base import Sampling


class TransformersEngine:
    """Generates with a Transformers or PEFT model in this process.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: of the model; it says what pads a batch and what ends an answer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        eos = tokenizer.eos_token_id
        self._pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos or 0)
        # A chat model ends its turns with a token of its generation config, which need not be the tokenizer's EOS.
        configured = model.generation_config.eos_token_id
        ends = list(configured) if isinstance(configured, list | tuple) else [configured]
        self._stop = sorted({int(token) for token in (eos, *ends) if token is not None})

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        batch_size: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """Token ids after each prompt; see :meth:`finray.evaluation.engines.base.Engine.generate`."""
        if sampling.temperature == 0.0:
            # None for what greedy search ignores: a model's generation config may set it, and Transformers then warns.
            choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        answers: list[list[int]] = [[] for _ in prompts]
        by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        torch.manual_seed(sampling.seed)
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            longest = len(prompts[batch[0]])
            tokens_BT = torch.full((len(batch), longest), self._pad, dtype=torch.int64)
            mask_BT = torch.zeros_like(tokens_BT)
            for row, index in enumerate(batch):
                tokens_BT[row, longest - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
                mask_BT[row, longest - len(prompts[index]) :] = 1
            output = self._model.generate(
                input_ids=tokens_BT.to(self._model.device),
                attention_mask=mask_BT.to(self._model.device),
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=self._pad,
                eos_token_id=self._stop,
                use_cache=True,
                **choice,
            )
            for row, index in enumerate(batch):
                answers[index] = list(takewhile(lambda token: token not in self._stop, output[row, longest:].tolist()))
            progress(start + len(batch))
        return answers
