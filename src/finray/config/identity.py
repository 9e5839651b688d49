"""Which configurations describe the same run.

A run may be continued on other hardware, with other metrics and more checkpoints, and it may be made longer. Whatever
else changes what is learned makes it a different run.
"""

from __future__ import annotations

import re
from typing import Any

from finray.config.paths import with_contents
from finray.config.redact import MASK, redact_saved
from finray.config.resolved import Resolved
from finray.config.schema import Config

# Neither the order of the data nor the arithmetic depends on these fields (tested by
# tests/integration/test_world_size.py).
FREE = (
    "cluster",
    "parallel",
    "tracking",
    "checkpoint",
    "export",
    "run.output_dir",
    "run.local_dir",
    "train.micro_batch_size",
    "preference.reference_in_step",
    "train.gradient_checkpointing",
    "train.activation_offload",
    "train.profile",
    "evaluation",
    "prepare.num_workers",
    "prepare.dir",
    "prepare.local_dir",
)

# Training continues with the same prepared rows alone, which says more of a format than its name: `auto` may come to
# what is named now, and a run from before `auto` read prompts and completions as chat continues with
# `prompt_completion`.
_GUARDED = ("data.format",)

# How long a run is. It may be made longer: the order of the data continues without an end.
LENGTH = ("train.epochs", "train.max_steps")


def with_decisions(config: Config, resolved: Resolved | None) -> dict[str, dict[str, Any]]:
    """A config as plain types, with what its run decided in the place of what it leaves open: size of a step, epochs,
    learning rate, classes. For comparing configs, and for people; whatever computes reads ``resolved``."""
    plain = config.plain()
    if resolved is None:
        return plain
    train, classification = plain["train"], plain["classification"]
    if train["global_batch_size"] == "auto":
        train["global_batch_size"] = resolved.global_batch_size
    if train["micro_batch_size"] == "auto":
        train["micro_batch_size"] = resolved.micro_batch_size
    if train["learning_rate"] == "auto":
        train["learning_rate"] = resolved.learning_rate
    if train["epochs"] is None and train["max_steps"] is None:
        train["epochs"] = resolved.epochs
    if resolved.problem is not None:
        classification["problem"] = classification["problem"] or resolved.problem
        classification["labels"] = classification["labels"] or list(resolved.labels) or None
    return plain


def length(config: Config, resolved: Resolved | None) -> tuple[str, float]:
    """The field that says how long the run is, and its value."""
    train = config.train
    if train.max_steps is not None:
        return "train.max_steps", train.max_steps
    if train.epochs is not None:
        return "train.epochs", train.epochs
    return "train.epochs", 1.0 if resolved is None else resolved.epochs


def flatten(data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Dotted path (``section.field``) to value; lists and mappings stay values."""
    return {f"{section}.{field}": value for section, fields in data.items() for field, value in fields.items()}


def is_free(path: str) -> bool:
    """Whether a field may change between two starts of the same run."""
    return any(path == free or path.startswith(f"{free}.") for free in FREE)


def _same(old: Any, new: Any) -> bool:
    """Whether two values are equal; parts that were masked when the first was written match anything."""
    if isinstance(old, str) and isinstance(new, str) and MASK in old:
        return re.fullmatch(".*".join(map(re.escape, old.split(MASK))), new, re.DOTALL) is not None
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    return bool(old == new)


def differences(old: Config, new: Config, resolved: Resolved | None = None) -> list[tuple[str, Any, Any]]:
    """Fields that make two configurations different runs, as ``(path, old, new)``; ``resolved`` is what the run decided
    where one of them leaves a field open.

    Of the length of the run only whether it became shorter; whether some steps are fewer than some epochs, only the
    data tells.
    """
    # The configuration on disk has its secrets masked, so both sides are compared masked.
    # One may name a chat template's file, and the other be from a job that carries the template itself.
    before, after = (flatten(redact_saved(with_decisions(with_contents(side), resolved))) for side in (old, new))
    changes = [
        (path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if not _same(before.get(path), after.get(path)) and not is_free(path) and path not in (*LENGTH, *_GUARDED)
    ]
    (field, was), (now, becomes) = length(old, resolved), length(new, resolved)
    return [*changes, *([(field, was, becomes)] if field == now and becomes < was else [])]
