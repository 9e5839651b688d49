"""What every engine is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: greedily when ``temperature`` is 0."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Engine(Protocol):
    """A model that answers prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        batch_size: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """Token ids generated after each prompt, in the order of the prompts, without the token that ended them.

        Args:
            prompts: token ids.
            sampling: how tokens are chosen.
            batch_size: prompts in one batch.
            progress: called with the number of prompts answered so far.
        """
