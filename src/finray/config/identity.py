"""Which configurations describe the same run.

A run may be continued on other hardware, watched differently and saved more often; whatever changes what is
learned makes it another run.
"""

from __future__ import annotations

from typing import Any

from finray.config.redact import redact
from finray.config.schema import Config

# Neither the data stream nor the arithmetic depends on these (tests/integration/test_world_size.py holds them to it).
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


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted paths; lists and free-form mappings stay values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and not prefix:
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def is_free(path: str) -> bool:
    """Whether a field may change between two starts of the same run."""
    return any(path == free or path.startswith(f"{free}.") for free in FREE)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that make two configurations different runs, as ``(path, old, new)``."""
    # What is on disk is redacted, so both sides are.
    before, after = flatten(redact(old.plain())), flatten(redact(new.plain()))
    return [
        (path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not is_free(path)
    ]
