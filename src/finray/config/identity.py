"""Which configurations describe the same run.

A run may be continued on other hardware, with other metrics and more checkpoints. Whatever changes what is learned
makes it a different run.
"""

from __future__ import annotations

from typing import Any

from finray.config.redact import redact
from finray.config.schema import Config

# Neither the order of the data nor the arithmetic depends on these fields (tested by
# tests/integration/test_world_size.py).
FREE = (
    "cluster",
    "parallel",
    "tracking",
    "checkpoint",
    "run.output_dir",
    "train.micro_batch_size",
    "train.gradient_checkpointing",
    "train.activation_offload",
    "train.profile",
    "evaluation",
    "prepare.num_workers",
    "prepare.dir",
    "prepare.local_dir",
)


def flatten(data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Dotted path (``section.field``) to value; lists and mappings stay values."""
    return {f"{section}.{field}": value for section, fields in data.items() for field, value in fields.items()}


def is_free(path: str) -> bool:
    """Whether a field may change between two starts of the same run."""
    return any(path == free or path.startswith(f"{free}.") for free in FREE)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that make two configurations different runs, as ``(path, old, new)``."""
    # The configuration on disk has its secrets masked, so both sides are compared masked.
    before, after = flatten(redact(old.plain())), flatten(redact(new.plain()))
    return [
        (path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not is_free(path)
    ]
