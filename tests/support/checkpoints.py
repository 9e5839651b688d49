"""Checkpoints of one rank, and ones that a test has changed on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finray.checkpoint import CheckpointStore, manifest


def write(store: CheckpointStore, step: int, fill: Callable[[Path], None], **metrics: float) -> Path:
    """A checkpoint of one rank."""
    scratch = store.begin(step)
    try:
        return store.commit(scratch, step, store.fill(scratch, step, fill), metrics=metrics)
    finally:
        store.abandon(scratch)


def reseal(checkpoint: Path) -> None:
    """A manifest that fits the changed files, so that the change and not the damage is what is tested."""
    content = manifest.read(checkpoint)
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != manifest.NAME]
    entries = [manifest.entry(checkpoint, path) for path in paths]
    manifest.write(checkpoint, entries, step=content["step"], metrics=content["metrics"])
