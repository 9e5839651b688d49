"""What every engine can be asked: answers to prompts, and how likely given continuations are.

An engine is one file and a line in ``config/extensions.py``. It is handed token ids, so that a prompt is the very
tokens of training, and gives each answer as soon as it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from finray.config.schema import ModelConfig
from finray.errors import DataError
from finray.evaluation.artifacts import inference_device, inference_dtype
from finray.evaluation.engines.sampling import Sampling
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer

# Called with the number of a row and the token that was just chosen for it; the token that ends an answer is not told.
OnToken = Callable[[int, int], None]
# Token ids of each prompt, and numbers of prompts.
Ids = Sequence[Sequence[int]]
Numbers = Sequence[int]


def mute(row: int, token: int) -> None:
    """Tells nobody of a token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is finished.

    Attributes:
        row: number of its prompt.
        tokens: token ids, without the one that ended it.
        text: without special tokens, up to a stop string.
        finish: ``stop`` at an end-of-turn token or a stop string, else ``length``.
    """

    row: int
    tokens: tuple[int, ...]
    text: str
    finish: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens whose likelihood is asked for, after a context of at least one token."""

    context: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely the tokens of a continuation are.

    Attributes:
        row: number of the continuation.
        logprobs: natural logarithm of the probability of each token, given all before it.
        is_greedy: whether greedy search would have chosen each of them.
    """

    row: int
    logprobs: tuple[float, ...]
    is_greedy: bool


class Engine(Protocol):
    """A model that is loaded, and what runs it.

    Attributes:
        name: of the engine, for ``metrics.json``.
        version: of the engine and of what it computes with.
        tokenizer: of the model.
        max_length: most tokens of a prompt and its answer; None where the model has no such limit.
    """

    name: str
    version: str
    tokenizer: Any
    max_length: int | None

    def generate(
        self, prompts: Ids, sampling: Sampling, *, rows: Numbers = (), adapter: bool = True, on_token: OnToken = mute
    ) -> Iterator[Answer]:
        """Answers in the order in which they are finished.

        Args:
            prompts: token ids.
            sampling: how tokens are chosen.
            rows: a number for each prompt: its answer bears it, and with the seed it decides what is sampled, whatever
                else is answered beside it. Without them they are counted from 0.
            adapter: whether an adapter takes part; without it the base model answers.
            on_token: told of each token as it is chosen.

        Raises:
            DataError: a prompt is empty, or leaves no room for an answer.
        """

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they are known; continuations of one context share its computation.

        Raises:
            DataError: a context is empty, or row and context are longer than the model can read.
        """

    def close(self) -> None:
        """Give back memory and processes."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What an engine is made from.

    Attributes:
        artifact: the weights.
        tokenizer: of the model.
        device: where the model runs, unless the engine knows better.
        dtype: of weights and arithmetic.
        batch_size: rows at work at the same time, at most.
        merge: fold an adapter into the weights: faster, and no longer the arithmetic of training. The base model then
            does not answer.
        tell: is told in one line what a user should know.
    """

    artifact: Artifact
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    batch_size: int = 32
    merge: bool = False
    tell: Callable[[str], None] = lambda line: None

    @classmethod
    def of(
        cls,
        artifact: Artifact,
        *,
        batch_size: int = 32,
        merge: bool = False,
        dtype: torch.dtype | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Loading:
        """With the tokenizer beside the weights, on the GPU if there is one; dtype as for inference."""
        device = inference_device()
        tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
        dtype = inference_dtype(None, device) if dtype is None else dtype
        return cls(artifact, tokenizer, device, dtype, batch_size, merge, tell)


def check_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[int], max_length: int | None) -> None:
    """Refuse prompts that cannot be answered, before the first one is.

    Raises:
        DataError: one is empty, or leaves no room for a token.
    """
    for prompt, row in zip(prompts, rows, strict=True):
        if not prompt:
            raise DataError("an empty prompt is nothing to go on from", where=f"prompt {row + 1}")
        if max_length is not None and len(prompt) >= max_length:
            raise DataError(
                f"the prompt has {len(prompt):,} tokens, and the model reads {max_length:,} with its answer",
                where=f"prompt {row + 1}",
                repair="shorten it, or leave it out",
            )


def check_continuations(rows: Sequence[Continuation], max_length: int | None) -> None:
    """Refuse continuations that cannot be scored, before the first one is.

    Raises:
        DataError: one has no tokens, nothing before them, or more than the model reads (of the last, it reads none).
    """
    for number, row in enumerate(rows):
        if not row.context or not row.tokens:
            raise DataError("a continuation needs a token, and one before it", where=f"row {number + 1}")
        if max_length is not None and len(row.context) + len(row.tokens) - 1 > max_length:
            raise DataError(
                f"the row has {len(row.context) + len(row.tokens):,} tokens, and the model reads {max_length:,}",
                where=f"row {number + 1}",
                repair="shorten it, or leave it out",
            )
