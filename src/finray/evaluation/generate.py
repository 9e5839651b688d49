"""Answers from a Transformers model: prompts in batches of similar length, padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: greedily when ``temperature`` is 0."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    pad_id: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Token ids generated after each prompt, in the order of the prompts, without the stop token.

    Args:
        model: a causal language model in evaluation mode.
        prompts: token ids.
        pad_id: fills up shorter prompts (masked out).
        stop_ids: tokens that end an answer.
        sampling: how tokens are chosen.
        batch_size: prompts at a time.
        progress: called with the number of prompts done so far.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    torch.manual_seed(sampling.seed)
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        longest = len(prompts[batch[0]])
        tokens = torch.full((len(batch), longest), pad_id, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, index in enumerate(batch):
            tokens[row, longest - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
            mask[row, longest - len(prompts[index]) :] = 1
        output = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad_id,
            eos_token_id=list(stop_ids),
            use_cache=True,
            **_choice(sampling),
        )
        for row, index in enumerate(batch):
            answers[index] = _until_stop(output[row, longest:].tolist(), set(stop_ids))
        progress(start + len(batch))
    return answers


def _choice(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0.0:
        # None for what greedy search ignores: a model's generation config may set it, and Transformers then warns.
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}


def _until_stop(tokens: list[int], stop: set[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in stop:
            return tokens[:position]
    return tokens
