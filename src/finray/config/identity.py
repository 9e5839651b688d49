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


def settled(config: Config, resolved: Resolved | None) -> Config:
    """A config with what its run chose in the place of what it leaves to finray: size of a step, epochs,
    learning rate, classes.

    Args:
        resolved: what the run chose; None where it chose nothing yet.
    """
    changes: dict[str, float] = {}
    if resolved is not None and config.train.global_batch_size == "auto":
        changes["global_batch_size"] = resolved.global_batch_size
    if resolved is not None and config.train.epochs is None and config.train.max_steps is None:
        changes["epochs"] = resolved.epochs
    if resolved is not None and config.train.learning_rate == "auto":
        changes["learning_rate"] = resolved.learning_rate
    sections: dict[str, Any] = {"train": config.train.model_copy(update=changes)}
    if resolved is not None and resolved.problem is not None:
        own = config.classification
        found = {"problem": own.problem or resolved.problem, "labels": own.labels or list(resolved.labels) or None}
        sections["classification"] = own.model_copy(update=found)
    return config.model_copy(update=sections)


def length(config: Config) -> tuple[str, float]:
    """The field that says how long the run is, and its value."""
    if config.train.max_steps is not None:
        return "train.max_steps", config.train.max_steps
    return "train.epochs", 1.0 if config.train.epochs is None else config.train.epochs


def flatten(data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Dotted path (``section.field``) to value; lists and mappings stay values."""
    return {f"{section}.{field}": value for section, fields in data.items() for field, value in fields.items()}


def is_free(path: str) -> bool:
    """Whether a field may change between two starts of the same run."""
    return any(path == free or path.startswith(f"{free}.") for free in FREE)


def _same(old: Any, new: Any) -> bool:
    """Whether two values are equal; what was masked when the first was written may be anything."""
    if isinstance(old, str) and isinstance(new, str) and MASK in old:
        return re.fullmatch(".*".join(map(re.escape, old.split(MASK))), new, re.DOTALL) is not None
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    return bool(old == new)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that make two configurations different runs, as ``(path, old, new)``.

    Of the length of the run only whether it became shorter; whether some steps are fewer than some epochs, only the
    data tells.
    """
    # The configuration on disk has its secrets masked, so both sides are compared masked.
    # One may name a chat template's file, and the other be from a job that carries the template itself.
    before, after = (flatten(redact_saved(with_contents(one).plain())) for one in (old, new))
    found = [
        (path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if not _same(before.get(path), after.get(path)) and not is_free(path) and path not in (*LENGTH, *_GUARDED)
    ]
    (field, was), (now, becomes) = length(old), length(new)
    return [*found, *([(field, was, becomes)] if field == now and becomes < was else [])]
