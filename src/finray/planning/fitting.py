"""The smallest set of changes that makes a run fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product

# What a change costs, in no unit: less is better. A smaller micro-batch changes nothing that is learned, checkpointing
# costs time, bf16 rounds, shorter rows lose text, and an adapter trains something else.
_COSTS = {"micro_batch_size": 1.0, "gradient_checkpointing": 2.0, "precision": 4.0, "shorter_packs": 3.0}
_LOSES_TEXT = 8.0
_ADAPTER = 64.0
_SHORTEST = 128
_PATHS = {
    "micro_batch_size": "train.micro_batch_size",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "precision": "train.precision",
    "max_length": "data.max_length",
    "adapter": "adapter.method",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The fields that may be changed, as the run has them.

    Attributes:
        micro_batch_size: packs or rows per forward pass.
        gradient_checkpointing: ``none``, ``selective`` or ``full``.
        precision: ``fp32`` or ``bf16``, resolved.
        max_length: most tokens in a row.
        adapter: ``adapter.method``.
    """

    micro_batch_size: int
    gradient_checkpointing: str
    precision: str
    max_length: int
    adapter: str

    def overrides_from(self, before: Choice) -> tuple[str, ...]:
        """What differs from another choice, as overrides of the command line."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(before, field.name)]
        return tuple(f"{_PATHS[name]}={str(getattr(self, name)).lower()}" for name in changed)


def smallest_change(now: Choice, fits: Callable[[Choice], bool], *, longest: int) -> Choice | None:
    """The choice that fits and differs least from the present one; None where none does.

    Every combination is tried, from the one that changes least on, so what is returned holds no change that it could
    do without.

    Args:
        now: what the run has.
        fits: whether a choice fits.
        longest: tokens of the longest row: packs may become as short without losing text.
    """
    return next((choice for choice in _by_cost(now, longest) if fits(choice)), None)


def _by_cost(now: Choice, longest: int) -> Iterator[Choice]:
    choices = [
        Choice(micro, checkpointing, precision, length, adapter)
        for micro, checkpointing, precision, length, adapter in product(
            _halved(now.micro_batch_size, 1),
            {now.gradient_checkpointing, "full"},
            {now.precision, "bf16"},
            _halved(now.max_length, _SHORTEST),
            {now.adapter, "lora" if now.adapter == "none" else now.adapter},
        )
    ]
    return iter(sorted(choices, key=lambda choice: _cost(now, choice, longest)))


def _halved(value: int, least: int) -> list[int]:
    """A value, its half, and so on, down to the least."""
    found = [value]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found


def _cost(now: Choice, choice: Choice, longest: int) -> float:
    cost = 0.0
    if choice.micro_batch_size != now.micro_batch_size:
        # The largest that fits: of two smaller ones, the one that is less so.
        cost += _COSTS["micro_batch_size"] + 0.01 * (now.micro_batch_size / choice.micro_batch_size)
    for name in ("gradient_checkpointing", "precision"):
        cost += _COSTS[name] * (getattr(choice, name) != getattr(now, name))
    if choice.max_length != now.max_length:
        halvings = (now.max_length / choice.max_length - 1) * 0.5
        cost += _COSTS["shorter_packs"] + halvings if choice.max_length >= longest else _LOSES_TEXT * (1 + halvings)
    return cost + _ADAPTER * (choice.adapter != now.adapter)
