"""Samples the next token from logits, with the row's own random numbers, independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finray.config.requests import AnswerRequest, SamplingRequest
from finray.errors import ConfigError, ModelError
from finray.limits import shown

# In the place of a token, where a row has none: no distribution can be made of its logits.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; greedy if ``temperature`` is 0.

    Temperature, then ``top_k``, then ``top_p`` change the logits like Transformers' warpers of these names. The engine
    applies ``repetition_penalty`` before, like Transformers' processor; None means that of the model's generation
    config. An answer ends before the first of the strings ``stop``.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, request: SamplingRequest, max_new_tokens: int) -> Sampling:
        """The settings that a request names."""
        return cls(
            max_new_tokens,
            request.temperature,
            request.top_p,
            request.seed,
            request.top_k,
            *((request.stop_texts, request.repetition_penalty) if isinstance(request, AnswerRequest) else ()),
        )

    def __post_init__(self) -> None:
        penalty = self.repetition_penalty
        # Logits are divided by the temperature, and by the penalty.
        for name, ok, wanted in (
            ("temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0, or from 0.001 to 1000"),
            ("top_p", 0 < self.top_p <= 1, "above 0, and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 for all tokens, or from 1 to 2**31 - 1"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("max_new_tokens", 1 <= self.max_new_tokens < 2**31, "from 1 to 2**31 - 1"),
            ("stop", all(self.stop), "of one character or more"),
            ("repetition_penalty", penalty is None or 1e-2 <= penalty <= 1e2, "from 0.01 to 100; 1 is no penalty"),
        ):
            if not ok:
                raise ConfigError(
                    f"{shown(getattr(self, name))} cannot be used",
                    where=f"--{name.replace('_', '-')}",
                    repair=f"use a value {wanted}",
                )

    def uniform(self, row: int, step: int) -> float:
        """The random number in [0, 1) for token ``step`` of a row, independent of other rows in the batch."""
        bits = np.random.Philox(key=self.seed << 64 | row, counter=step)
        return float(np.random.Generator(bits).random())

    def row_seed(self, row: int) -> int:
        """A seed per row (63 bits), for an engine that draws its random numbers itself."""
        return int(np.random.Philox(key=self.seed << 64 | row).random_raw()) >> 1

    def cut(self, text: str) -> str:
        """Truncate text at the first stop string."""
        return text[: min((at for word in self.stop if (at := text.find(word)) >= 0), default=len(text))]

    def choose(self, logits_BV: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """The next token of each row (B, int64); ``NO_TOKEN`` where its logits are not finite.

        Args:
            logits_BV: of any float dtype.
            rows: number of each row.
            steps: number of tokens that each row already has.
        """
        if not self.temperature:
            return likeliest(logits_BV)
        return self.draw(logits_BV, [self.uniform(row, step) for row, step in zip(rows, steps, strict=True)])

    def draw(self, logits_BV: torch.Tensor, drawn: Sequence[float]) -> torch.Tensor:
        """The next token of each row (B, int64), given its number in [0, 1), for a temperature above 0; ``NO_TOKEN``
        where its logits are not finite, or not after they were divided by the temperature."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        unused = torch.empty(0)
        # Transformers refuses an int, such as 1 from Python.
        scores = TemperatureLogitsWarper(float(self.temperature))(unused, logits_BV.float())
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(unused, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(unused, scores)
        # The first token at which the cumulative distribution exceeds the random number.
        below_BV = scores.double().softmax(-1).cumsum(-1)
        drawn_B1 = torch.tensor(drawn, dtype=torch.float64, device=scores.device)[:, None] * below_BV[:, -1:]
        token_B = torch.searchsorted(below_BV, drawn_B1, right=True)[:, 0].clamp(max=below_BV.shape[-1] - 1)
        return torch.where(below_BV[:, -1].isfinite(), token_B, NO_TOKEN)


def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row (B, int64); ``NO_TOKEN`` where the logits are not finite."""
    # NaN counts as the largest. Minus infinity is a token that the model rules out.
    return torch.where(logits_BV.amax(-1).isfinite(), logits_BV.argmax(-1), NO_TOKEN)


def not_finite(what: str) -> ModelError:
    """The error of a row that has no next token, or no label."""
    return ModelError(
        f"{what}: the model's logits are not finite (NaN or infinite)",
        repair="its weights or those of its adapter may have diverged in training, or are too large for this dtype",
    )


def end_tokens(tokenizer: Any, generation: Any) -> frozenset[int]:
    """Tokens that end an answer.

    A chat model ends its turns with a token of its generation config, which may differ from the tokenizer's EOS.
    """
    configured = generation.eos_token_id
    ends = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(token) for token in (tokenizer.eos_token_id, *ends) if token is not None)
