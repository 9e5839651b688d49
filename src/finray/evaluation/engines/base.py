"""The interface of engines: answers to prompts, and likelihoods of given continuations.

An engine is one file and a line in ``config/extensions.py``. It gets token ids, so that a prompt has exactly the tokens
of training, and yields each answer as soon as it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from finray.errors import ConfigError, DataError, ModelError
from finray.evaluation.artifacts import inference_device, inference_dtype
from finray.evaluation.engines.sampling import Sampling
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer

# Called with the row's number and the token that was just chosen; not called for the token that ends an answer.
OnToken = Callable[[int, int], None]
# Token ids of each prompt, and numbers of prompts.
Ids = Sequence[Sequence[int]]
Numbers = Sequence[int]


def mute(row: int, token: int) -> None:
    """Ignores the token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        row: number of its prompt.
        tokens: token ids, without the end token.
        text: without special tokens, up to a stop string.
        finish: ``stop`` at an end-of-turn token or a stop string, else ``length``.
        end: the end token, if one ended it.
        logprobs: if asked for, natural logarithm of the probability that the model gave each token (and then the end
            token), before temperature, penalties and cuts of the distribution.
        weights: version of the weights that computed it; see :class:`Engine`.
    """

    row: int
    tokens: tuple[int, ...]
    text: str
    finish: Literal["stop", "length"]
    end: int | None = None
    logprobs: tuple[float, ...] = ()
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens to score, after a context of at least one token."""

    context: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities of the tokens of a continuation.

    Attributes:
        row: number of the continuation.
        logprobs: natural logarithm of the probability of each token, given all tokens before it.
        is_greedy: whether greedy search would have chosen every one of them.
    """

    row: int
    logprobs: tuple[float, ...]
    is_greedy: bool


class Engine(Protocol):
    """A loaded model and its inference engine.

    Attributes:
        name: of the engine, for ``metrics.json``.
        version: of the engine and of the libraries that it computes with.
        tokenizer: of the model.
        max_length: maximum tokens of a prompt and its answer; None if the model has no limit.
        weights: version of the weights, 0 as they were loaded. Whoever changes them counts it up, between two calls.
    """

    name: str
    version: str
    tokenizer: Any
    max_length: int | None
    weights: int

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
        """Answers in the order in which they finish.

        Args:
            prompts: token ids.
            sampling: how tokens are chosen.
            rows: a number for each prompt: the answer carries it, and together with the seed it determines the sample,
                whatever else is in the batch. By default they count from 0.
            adapter: whether to apply the adapter; without it the base model answers.
            on_token: called with each token as it is chosen.
            logprobs: whether answers have the log-probability of each token.

        Raises:
            DataError: a prompt is empty, or leaves no room for an answer.
        """

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they finish; continuations of the same context share its computation.
        Raises DataError: a context is empty, or context and continuation are longer than the model can read."""

    def close(self) -> None:
        """Free memory and processes."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The ingredients of an engine.

    Attributes:
        artifact: the weights.
        tokenizer: of the model.
        device: where the model runs, unless the engine decides itself.
        dtype: of weights and arithmetic.
        batch_size: maximum number of rows processed at the same time.
        merge: merge an adapter into the weights: faster, but not the arithmetic of training, and the base model cannot
            answer.
        notify: called with messages for the user, one line each.
    """

    artifact: Artifact
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    batch_size: int = 32
    merge: bool = False
    notify: Callable[[str], None] = lambda line: None

    @classmethod
    def of(
        cls,
        artifact: Artifact,
        *,
        batch_size: int = 32,
        merge: bool = False,
        dtype: torch.dtype | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> Loading:
        """With the tokenizer next to the weights, on the GPU if there is one; dtype as for inference.
        Raises ConfigError: ``batch_size`` is less than 1."""
        if batch_size < 1:
            raise ConfigError(f"a batch cannot have {batch_size} rows", where="--batch-size", repair="use 1 or more")
        device = inference_device()
        tokenizer = load_tokenizer(artifact.tokenizer)
        dtype = inference_dtype(None, device) if dtype is None else dtype
        return cls(artifact, tokenizer, device, dtype, batch_size, merge, notify)


def check_adapter(adapter: bool, *, is_merged: bool) -> None:
    """Refuse to answer without an adapter that is merged. Raises ModelError: the base model is asked for."""
    if not adapter and is_merged:
        raise ModelError(
            "the adapter is merged into the weights, so the base model cannot answer",
            repair="use --engine transformers without --merge, which keeps them apart",
        )


def check_prompts(
    prompts: Sequence[Sequence[int]], rows: Sequence[int], max_length: int | None, vocabulary: int | None = None
) -> None:
    """Refuse prompts that cannot be answered, before generating anything.

    Args:
        prompts: token ids.
        rows: the number of each.
        max_length: maximum tokens of a prompt and its answer.
        vocabulary: number of tokens that the model has an embedding for.

    Raises:
        DataError: one is empty, leaves no room for a token, or has a token that the model does not know.
    """
    for prompt, row in zip(prompts, rows, strict=True):
        if not prompt:
            raise DataError("the prompt is empty", where=f"prompt {row + 1}")
        if max_length is not None and len(prompt) >= max_length:
            raise DataError(
                f"the prompt has {len(prompt):,} tokens; prompt and answer together may have {max_length:,}",
                where=f"prompt {row + 1}",
                repair="shorten it, or leave it out",
            )
        _check_tokens(prompt, f"prompt {row + 1}", vocabulary)


def _check_tokens(tokens: Sequence[int], where: str, vocabulary: int | None) -> None:
    """Refuse a token without an embedding: it would end the step of all rows beside it.

    A tokenizer may have more tokens than its model, such as one for images that Gemma 3's text models do not read.
    """
    odd = next((token for token in tokens if not 0 <= token < vocabulary), None) if vocabulary is not None else None
    if odd is not None:
        raise DataError(
            f"the model has no embedding for the token {odd}; it has {vocabulary:,}",
            where=where,
            repair="leave out the text of that token, which is a special one of the tokenizer",
        )


def check_continuations(rows: Sequence[Continuation], max_length: int | None, vocabulary: int | None = None) -> None:
    """Refuse continuations that cannot be scored, before scoring anything.
    Raises DataError: one has no tokens, no context, a token that the model does not know, or more tokens than it
    reads (the last one is not read)."""
    for number, row in enumerate(rows):
        if not row.context or not row.tokens:
            raise DataError("a continuation needs at least one token, and a token before it", where=f"row {number + 1}")
        if max_length is not None and len(row.context) + len(row.tokens) - 1 > max_length:
            raise DataError(
                f"the row has {len(row.context) + len(row.tokens):,} tokens, but the model reads at most "
                f"{max_length:,}",
                where=f"row {number + 1}",
                repair="shorten it, or leave it out",
            )
        _check_tokens((*row.context, *row.tokens), f"row {number + 1}", vocabulary)
